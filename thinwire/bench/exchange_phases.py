"""A picture of every exchange: who sends how much in which phase, drawn from the ledgers of one step on virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.bench.exchange_cases import (
    CASES,
    WORD,
    ExchangePlan,
    Worker,
    make_gradient,
    make_group,
)
from thinwire.engine import run_virtual
from thinwire.exchange import Place
from thinwire.methods import Method
from thinwire.observe import Ledger
from thinwire.tools.figures import make_figure
from thinwire.tools.methods import build_method

COLUMNS = 2
# Words per entry kept; what an all-reduce of everything sends at 1 % is off this scale and shown as a number.
DARKEST = 8.0


def pictured_methods(world: int, density: float) -> dict[str, tuple[Method, int | None]]:
    """(method, ranks per host) by name; hierarchical where the ranks make two hosts of at least two."""
    shown: dict[str, tuple[Method, int | None]] = {
        case.name: (case.make(ExchangePlan(density=density)), None) for case in CASES.values()
    }
    if world >= 4 and world % 2 == 0:
        per_host = world // 2
        exchange = {"kind": "Hierarchical", "outer": {"kind": "Exclusive"}, "per_host": per_host}
        settings = {"density": density, "values": "fp32", "exchange": exchange}
        method = build_method("topk", settings)
        shown[f"hierarchical, 2 hosts of {per_host}, exclusive between"] = (method, per_host)
    return shown


def record_step(
    method: Method, world: int, numel: int, per_host: int | None = None
) -> list[Ledger]:
    """The ledger of every rank after one step on virtual ranks."""
    device = torch.device("cpu")
    ledgers = [Ledger(world) for _ in range(world)]
    programs = []
    for rank in range(world):
        worker = Worker(method, make_group(numel, device), Place(rank, world))
        programs.append(worker.open(make_gradient(numel, rank, 0, device)).program)
    run_virtual(programs, ledgers, per_host=per_host)
    return ledgers


def words_by_phase(ledgers: Sequence[Ledger], k: int) -> dict[str, list[float]]:
    """Words that each rank sends per entry kept, by "phase, collective", in the order of the exchange."""
    rows = [ledger.rows() for ledger in ledgers]
    keys = dict.fromkeys(key for one in rows for key in one)
    return {
        ", ".join((phase.removeprefix("sparse/"), collective.replace("_", "-"))): [
            one[phase, collective].sent_bytes / WORD / k if (phase, collective) in one else 0.0
            for one in rows
        ]
        for phase, collective in keys
    }


def draw_phases(world: int, numel: int, density: float, path: Path) -> Path:
    """One panel per exchange: a row per phase, a column per rank, in each cell the words sent per entry kept."""
    k = max(1, int(numel * density))
    panels = {
        name: words_by_phase(record_step(method, world, numel, per_host), k)
        for name, (method, per_host) in pictured_methods(world, density).items()
    }
    lines = -(-len(panels) // COLUMNS)
    names = list(panels)
    heights = [
        1.5 + max(len(panels[name]) for name in names[line * COLUMNS : (line + 1) * COLUMNS])
        for line in range(lines)
    ]
    figure = make_figure(13, 0.32 * sum(heights) + 0.8, dpi=110)
    grid = figure.subplots(lines, COLUMNS, squeeze=False, height_ratios=heights)
    for axes, name in zip(grid.flat, names, strict=False):
        _draw_panel(axes, name, panels[name])
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    figure.suptitle(
        f"words that each of {world} ranks sends in one step, per entry kept "
        f"({numel:,} elements, density {density:g}); all bytes, with padding and control"
    )
    figure.savefig(path)
    return path


def _draw_panel(axes: Any, name: str, phases: dict[str, list[float]]) -> None:
    table = list(phases.values())
    ranks = len(table[0])
    axes.imshow(table, aspect="auto", cmap="Blues", vmin=0.0, vmax=DARKEST)
    for y, row in enumerate(table):
        for x, words in enumerate(row):
            colour = "white" if words > 0.6 * DARKEST else "black"
            axes.text(x, y, _short(words), ha="center", va="center", fontsize=7, color=colour)
    total = sum(map(sum, table)) / ranks
    axes.set_title(f"{name}: {total:.3g} words per rank and entry kept", fontsize=9, loc="left")
    axes.set_yticks(range(len(table)), list(phases), fontsize=7)
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=6)
    axes.tick_params(length=0)


def _short(words: float) -> str:
    if words == 0:
        return ""
    return "<0.01" if words < 0.01 else f"{words:.3g}" if words >= 1 else f"{words:.2f}"
