"""`thinwire launch`: a launch file for a script of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from thinwire.errors import UsageError
from thinwire.tools.files import write_text
from thinwire.tools.hosts import read_hosts
from thinwire.tools.launch_files import KINDS, Terms, launch_file
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import File, NewFile, Positive
from thinwire.tools.settings.options import DryRun, command
from thinwire.validate import check_choice

SUBMIT = {"slurm": "sbatch", "pbs": "qsub", "torchrun": "bash"}
PYTHONS = ("python", "python3")

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LAUNCHER -- COMMAND",
        help="slurm, pbs or torchrun (by ssh), and what a worker runs.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Where it runs."""

    hosts: File | None = None
    """A line per machine, NAME [slots=N]; torchrun needs it."""
    workers: Positive = 1
    """On each machine without slots, usually its GPUs."""
    interface: str | None = None
    """The network interface for gradients, such as eth0."""
    out: NewFile | None = None
    """Write the file there; without it, it is shown."""

    def __post_init__(self) -> None:
        check_fields(self)


@command
def launch(
    words: Words = None, *, machines: Machines, cluster: Terms, dry_run: DryRun = False
) -> None:
    """Write a launch file that runs your own script on several machines.

    thinwire launch slurm --nodes 4 --workers 8 --time 12:00:00 -- python train.py

    Nothing is started. The file names this Python and this folder by their
    full paths; both must be there on every machine.
    """
    kind, *typed = words or [""]
    check_choice("launcher", kind, KINDS)
    python, program = torchrun_words(typed)
    text = launch_file(
        kind,
        program,
        name=Path(next(word for word in program if word != "-m")).stem,
        hosts=read_hosts(machines.hosts) if machines.hosts is not None else [],
        interface=machines.interface,
        per_host=machines.workers,
        python=python,
        terms=cluster,
    )
    if machines.out is None or dry_run:
        print(text, end="")
        return
    write_text(machines.out, text)
    print(f"{SUBMIT[kind]} {machines.out} starts it", file=sys.stderr)


def torchrun_words(typed: Sequence[str]) -> tuple[str, list[str]]:
    """(the Python to use, what torchrun is to run) of a command as it is typed on one machine."""
    if not typed:
        raise UsageError("the command is missing; write it after --, as in `-- python train.py`")
    first, *rest = typed
    if first == "thinwire":
        return sys.executable, ["-m", "thinwire", *rest]
    if Path(first).name not in PYTHONS and not Path(first).name.startswith("python3."):
        raise UsageError(
            f"the command is {first!r}; it must be python SCRIPT, python -m MODULE or thinwire, because torchrun starts Python"
        )
    python = sys.executable if first in PYTHONS else first
    if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        found = f"{rest[0]!r}" if rest else "nothing"
        raise UsageError(f"{first} is followed by {found}; it must be a script or -m MODULE")
    if rest[0] == "-m":
        check_module(rest[1:2])
    elif not Path(rest[0]).is_file():
        raise UsageError(f"the script is {rest[0]!r}, which is not a file seen from this folder")
    return python, rest


def check_module(names: Sequence[str]) -> None:
    if not names or find_spec(names[0].partition(".")[0]) is None:
        raise UsageError(f"the module is {''.join(names)!r}, which cannot be found from here")
