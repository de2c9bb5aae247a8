"""Layers: the plan and the traffic of every parameter, as plain values for a row."""

from __future__ import annotations

from typing import Any

from thinwire.observe import Stats
from thinwire.plan import PlanReport


def describe_layers(plan: PlanReport, stats: Stats) -> list[dict[str, Any]]:
    """What was decided about every parameter, and what it sent per step; plain values, in the order of the plan."""
    steps = max(1, stats.counted_steps)
    layers = []
    for row in plan:
        sent = stats.parameters.get(row.info.name)
        layers.append(
            {
                "name": row.info.name,
                "shape": list(row.info.shape),
                "elements": row.info.numel,
                "action": row.action,
                "why": row.reason,
                "density": None if sent is None else sent.density,
                "dense_bytes": None if sent is None else sent.dense_bytes / steps,
                "wire_bytes": None if sent is None else sent.wire_bytes / steps,
            }
        )
    return layers
