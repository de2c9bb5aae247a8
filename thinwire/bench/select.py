"""`thinwire bench select`: what each selection really sends, the energy it keeps, and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from thinwire.bench.data import LAWS, draw, real_gradients
from thinwire.bench.dry_run import DryRun, show_plan
from thinwire.bench.measure import check_device_name, choose_device, time_ms, to_csv
from thinwire.errors import UsageError
from thinwire.layout import Shard, Slot, SlotKind
from thinwire.observe.files import write_text
from thinwire.observe.tables import make_console
from thinwire.select.base import Selector
from thinwire.select.chunks import ChunkChoice
from thinwire.select.gaussian import GaussianThreshold
from thinwire.select.random import RandomChoice
from thinwire.select.redsync import RedSyncThreshold
from thinwire.select.rows import RowTable, keep_count
from thinwire.select.sampled import SampledThreshold
from thinwire.select.sidco import SIDCoThreshold
from thinwire.select.topk import TradTopK

DENSITIES = (0.01, 0.001)
REAL = "gradients"

SELECTIONS: dict[str, Callable[[float], Selector]] = {
    "exact top-k": TradTopK,
    "DGC": SampledThreshold,
    "GaussianK": GaussianThreshold,
    "RedSync": RedSyncThreshold,
    "RedSync trimmed": lambda d: RedSyncThreshold(d, trimmed=True),
    "SIDCo exponential, 1 stage": lambda d: SIDCoThreshold(d, distribution="exponential", stages=1),
    "SIDCo gamma, 2 stages": lambda d: SIDCoThreshold(d, distribution="gamma", stages=2),
    "SIDCo pareto, 2 stages": lambda d: SIDCoThreshold(d, distribution="pareto", stages=2),
    "RandomK": RandomChoice,
    "ChunkTopK": ChunkChoice,
    "DGC, published": lambda d: SampledThreshold(d, "published"),
    "GaussianK, published": lambda d: GaussianThreshold(d, "published"),
    "RedSync, published": lambda d: RedSyncThreshold(d, "published"),
    "RedSync trimmed, published": lambda d: RedSyncThreshold(d, "published", True),
    "SIDCo exponential, 1 stage, published": lambda d: SIDCoThreshold(
        d, "published", "exponential", 1
    ),
    "SIDCo gamma, 2 stages, published": lambda d: SIDCoThreshold(d, "published", "gamma", 2),
    "SIDCo pareto, 2 stages, published": lambda d: SIDCoThreshold(d, "published", "pareto", 2),
}
"""Published ones send what their estimate gives, cut at 4 k so that the payload has an end."""


@dataclass(frozen=True, kw_only=True)
class SelectRow:
    """One selection on one kind of data; several tensors of a kind are taken together."""

    data: str
    elements: int
    density: float
    selection: str
    realised: float
    """Entries chosen / (density x elements)."""
    energy: float
    """Squared sum of what was chosen / that of the exact top-k."""
    ms: float


def measure(selector: Selector, tensors: Sequence[Tensor], repeats: int) -> dict[str, float]:
    chosen, kept, best, asked, spent = 0, 0.0, 0.0, 0.0, 0.0
    for x in tensors:
        slot = Slot("x", (x.numel(),), (1,), 0, SlotKind.OTHER, Shard((x.numel(),)))
        table = RowTable([selector.rows(slot, None)], x.numel())
        picks = selector.session().pick(x, table, [None])
        chosen += int(picks.counts.sum()) if picks.counts is not None else table.entries
        kept += float(picks.values.double().square().sum())
        k = keep_count(x.numel(), selector.density)  # type: ignore[attr-defined]
        asked += selector.density * x.numel()  # type: ignore[attr-defined]
        best += float(x.double().square().topk(k).values.sum())
        session = selector.session()
        spent += time_ms(partial(session.pick, x, table, [None]), x.device, repeats)
    return {"realised": chosen / asked, "energy": kept / best, "ms": spent}


def measure_all(device: torch.device, elements: int, repeats: int) -> Iterator[SelectRow]:
    """Every law, the real gradients, every density and selection."""
    data = {law: [draw(law, elements).to(device)] for law in LAWS}
    # Below 32 entries the band of 0.8 to 1.25 has no room for whole numbers.
    gradients = [g.to(device) for g in real_gradients(width=256, steps=20).values()]
    for density in DENSITIES:
        tensors = data | {REAL: [g for g in gradients if density * g.numel() >= 32]}
        for name, parts in tensors.items():
            for selection, make in SELECTIONS.items():
                yield SelectRow(
                    data=name,
                    elements=sum(x.numel() for x in parts),
                    density=density,
                    selection=selection,
                    **measure(make(density), parts, repeats),
                )


def list_cases(elements: int) -> list[str]:
    """What `measure_all` measures, in words."""
    data = [*(f"{law}, {elements} elements" for law in LAWS), f"{REAL} of a small network"]
    return [
        f"{selection}, density {density:g}, {name}"
        for density in DENSITIES
        for name in data
        for selection in SELECTIONS
    ]


def select_table(rows: Sequence[SelectRow], title: str) -> Table:
    """One line per selection, one group of columns per density, data side by side."""
    table = Table(title=title)
    table.add_column("selection")
    table.add_column("density")
    names = list(dict.fromkeys(row.data for row in rows))
    for heading in names:
        table.add_column(f"{heading}\nsent energy", justify="right")
    table.add_column("ms", justify="right")
    for selection in dict.fromkeys(row.selection for row in rows):
        for density in dict.fromkeys(row.density for row in rows):
            mine = [r for r in rows if r.selection == selection and r.density == density]
            cells = [f"{row.realised:.2f} {row.energy:.3f}" for row in mine]
            ms = next(row.ms for row in mine)
            table.add_row(selection, f"{density:.1%}", *cells, f"{ms:.2f}")
    return table


def bench_select(
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows to this CSV file.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to select: cpu or cuda.")] = "cpu",
    elements: Annotated[int, typer.Option(help="Size of the tensors drawn.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(help="Timed calls; the median is shown.")] = 5,
    dry_run: DryRun = False,
) -> None:
    """Measure what every selection sends of what was asked, the energy it keeps of the exact top-k's, and its time.

    thinwire bench select --csv benchmarks/select-cpu.csv
    """
    if repeats < 1 or elements < 1:
        raise UsageError(f"--repeats is {repeats} and --elements {elements}; both must be positive")
    if dry_run:
        check_device_name(device)
        show_plan(list_cases(elements), device)
        return
    where, hardware = choose_device(device)
    rows = list(measure_all(where, elements, repeats))
    console = make_console()
    console.print(select_table(rows, f"Selections, {elements} elements; times on {hardware}"))
    if csv_file is not None:
        write_text(csv_file, to_csv(rows, hardware))
