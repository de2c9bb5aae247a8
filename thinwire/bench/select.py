"""`thinwire bench select`: what each selection really sends, the energy it keeps, and its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from thinwire.bench.data import LAWS, draw, real_gradients
from thinwire.bench.measure import Timed, choose_device, time_ms, to_csv
from thinwire.bench.selections import SELECTIONS
from thinwire.errors import UsageError
from thinwire.layout import RowTable, Shard, Slot, SlotKind, keep_count
from thinwire.select import Selector
from thinwire.tools.files import write_text
from thinwire.tools.settings.options import DryRun, command
from thinwire.tools.tables import make_console, show_plan

DENSITIES = (0.01, 0.001)
REAL = "gradients"


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
        picks = selector.session().pick(x, table)
        chosen += int(picks.counts.sum()) if picks.counts is not None else table.entries
        kept += float(picks.values.double().square().sum())
        k = keep_count(x.numel(), selector.density)  # type: ignore[attr-defined]
        asked += selector.density * x.numel()  # type: ignore[attr-defined]
        best += float(x.double().square().topk(k).values.sum())
        session = selector.session()
        spent += time_ms(partial(session.pick, x, table), x.device, repeats)
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


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What is selected from."""

    elements: int = 1_000_000
    """Size of the tensors drawn."""

    def __post_init__(self) -> None:
        if self.elements < 1:
            raise UsageError(f"--elements is {self.elements}; it must be at least 1")


@command
def bench_select(*, drawn: Drawn, timed: Timed, dry_run: DryRun = False) -> None:
    """Measure what every selection sends of what was asked, the energy it keeps of the exact top-k's, and its time.

    thinwire bench select --csv benchmarks/select-cpu.csv
    """
    elements = drawn.elements
    if dry_run:
        show_plan(list_cases(elements), timed.device)
        return
    where, hardware = choose_device(timed.device)
    rows = list(measure_all(where, elements, timed.repeats))
    title = f"Selections, {elements} elements; times on {hardware}"
    make_console().print(select_table(rows, title))
    if timed.csv is not None:
        write_text(timed.csv, to_csv(rows, hardware))
