"""`thinwire bench lowrank`: the command line of the benchmark of factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from thinwire.bench.exchange_report import show_rows
from thinwire.bench.lowrank import PAPER_RANKS, SHAPES, measure_models
from thinwire.bench.ranks import run_ranks
from thinwire.tools.clusters import ClusterScript
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import NewFolder, Positive
from thinwire.tools.settings.names import check_name
from thinwire.tools.settings.options import DryRun, command
from thinwire.tools.tables import format_table, show_plan

COLUMNS = {
    "model": "{model}",
    "workers": "{workers}",
    "rank": "{rank}",
    "sends": "{sends}",
    "tensors": "{tensors}",
    "MB": "{megabytes:.2f}",
    "tensor by tensor ms": "{per_tensor_ms:.2f}",
    "fused ms": "{fused_ms:.2f}",
}


@dataclass(frozen=True, kw_only=True)
class LowRankPlan:
    """What is sent, by how many ranks, how often."""

    models: tuple[str, ...] = ("resnet50",)
    """Some of {SHAPES}, with commas."""
    rank: Positive | None = None
    """Columns of the factors; the paper's unless given."""
    ranks: Positive = 4
    """Processes to start (not under torchrun)."""
    iters: Positive = 10
    """Steps to measure."""
    out: NewFolder | None = None
    """Folder for rows as CSV and JSON."""

    def __post_init__(self) -> None:
        check_fields(self)
        for model in self.models:
            check_name("model", model, SHAPES)


@command
def bench_lowrank(
    context: typer.Context,
    *,
    measured: LowRankPlan,
    cluster: ClusterScript,
    dry_run: DryRun = False,
) -> None:
    """Time all-reduces of a model's gradient: dense, as factors P, as factors Q; tensor by tensor and in one buffer.

    thinwire bench lowrank --models resnet50 --ranks 2 --iters 20
    """
    columns = {model: measured.rank or PAPER_RANKS[model] for model in measured.models}
    if cluster.wanted:
        cluster.show(context.find_root().obj, measured.ranks)
    elif dry_run:
        planned = [f"{model}, rank {count}" for model, count in columns.items()]
        show_plan(planned, f"{measured.ranks} processes")
    else:
        show(run_ranks(measure_models, measured.ranks, columns, measured.iters), measured.out)


def show(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Print what was measured, and write it to a folder if there is one."""
    shown = [{**row, "megabytes": row["bytes"] / 2**20} for row in rows]
    show_rows(format_table(COLUMNS, shown, box=None), rows, out)
