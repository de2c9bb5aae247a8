"""Options: what `thinwire train` and `thinwire compare` both take on the command line, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from thinwire.recipes.clusters import HostsFile, Interface, PrintLaunch

Given = dict[str, Any]
"""Options by name, as they were typed; None or False where nothing was said."""


def shared(
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes on this machine (4); under torchrun its own count.", metavar="N"
        ),
    ] = None,
    simulate_workers: Annotated[
        int | None, typer.Option(help="Workers in one process instead.", metavar="N")
    ] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Simulated workers' steps as CUDA graphs.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.", metavar="NAME")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", metavar="N")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many steps.", metavar="N")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per worker.", metavar="N")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", metavar="RATE")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16.", metavar="NAME")
    ] = None,
    channels_last: Annotated[
        bool | None,
        typer.Option(
            "--channels-last/--no-channels-last", help="Images and convolutions in that format."
        ),
    ] = None,
    values: Annotated[
        str | None, typer.Option(help="Value code on the wire, such as bf16.", metavar="CODE")
    ] = None,
    axis: Annotated[
        str | None, typer.Option(help="Of adtopk: auto, published or a number.", metavar="AXIS")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of powersgd and acpsgd.", metavar="N")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="TOML or YAML, or a name of --list; several with commas, later ones win.",
            metavar="FILES",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting, such as training.lr=0.1.", metavar="NAME=VALUE"),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Repeat every bit, also after --resume.")
    ] = False,
) -> None:
    """How it is trained."""


def shared_places(
    data: Annotated[
        str | None, typer.Option(help="With --model, instead of TASK.", metavar="NAME")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --data, instead of TASK.", metavar="NAME")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data sets are (THINWIRE_DATA).", metavar="FOLDER")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch missing data, checked.")
    ] = False,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random data of the right shape.")
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The same code with a two-layer model.")
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Save everything every so many steps.", metavar="N")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write its event files too.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; runs/... unless given.", metavar="FOLDER")
    ] = None,
    suffix: Annotated[
        str, typer.Option(help="Behind the run folder's own name.", metavar="TEXT")
    ] = "",
    ledger: Annotated[
        Path | None,
        typer.Option(help="Traffic per worker, method and phase, as CSV.", metavar="FILE"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show all settings and start nothing.")
    ] = False,
    print_launch: PrintLaunch = None,
    hosts: HostsFile = None,
    interface: Interface = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Show tasks, data, models, configurations.")
    ] = False,
) -> None:
    """Where things come from and where they go."""


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """With the annotations themselves in place of their text."""
    annotations = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=annotations[name])
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def takes_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take the options above beside its own; it gets them together as `given`."""
    own = [parameter for parameter in parameters_of(command) if parameter.name != "given"]
    others = [*parameters_of(shared), *parameters_of(shared_places)]

    @wraps(command)
    def together(**typed: Any) -> None:
        given = {parameter.name: typed.pop(parameter.name) for parameter in others}
        command(**typed, given=given)

    signature = inspect.Signature([*own, *others])
    together.__signature__ = signature  # type: ignore[attr-defined]
    together.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return together
