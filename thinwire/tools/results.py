"""Results: what the runs of a job did, as measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a comparison. Bytes are those that rank 0 put on the wire."""

    run: str
    """Its name among the runs of the job."""
    method: str
    settings: str
    """The method with all its settings."""
    asked_density: float | None
    """None for a method without a density."""
    seed: int
    density: float
    """Entries sent / elements, over the parameters that were compressed."""
    metric: str
    """What the score is, such as top1."""
    higher_is_better: bool
    score: float
    """At the end, on the whole test set; a share is in [0, 1]."""
    metrics: dict[str, float]
    """All metrics of the task."""
    tests: list[list[float]]
    """[step, score] of every test."""
    steps: int
    parameters: int
    dense_bytes_per_step: float
    wire_bytes_per_step: float
    ratio: float
    ms_per_step: float | None
    """Median over the steps since the run began or was resumed."""
    exposed_ms_per_step: float | None
    """Median time in which a step waited for nothing but the exchange; None where nothing travels."""
    examples_per_second: float | None
    """Of all workers together, in a median step."""
    replicas_identical: bool
    """Whether all workers ended with the same bits in all parameters."""
    seconds: float
    simulation: dict[str, Any] | None = None
    """What simulated workers cost in memory and time, the fields of `SimulationReport`; None for real ones."""

    layers: list[dict[str, Any]] | None = None
    """Per parameter: name, shape, elements, action and why (the plan), and density, dense_bytes and wire_bytes per step."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def group_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs that differ only in the seed, together; in the order of their first."""
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.asked_density), []).append(row)
    return list(groups.values())


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Every finished cell: the fields of its row, `about` (all its settings) and `origin` (what it was measured with)."""
    path = out / SUMMARY_FILE
    if not path.exists():
        return []
    try:
        rows = list(json.loads(path.read_text())["rows"])
        if all({"run", "about"} <= row.keys() for row in rows):
            return rows
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path} is damaged; remove it to have the runs done again")
