"""Layer-wise density: one budget, filled into the layers like water, so that small layers are not starved.

A common density gives a row of 64 elements one entry in a hundred, which is none, and a row of 4096 forty. Water-filling
gives every row of the model about the same number of entries and layers that fill up to the brim go dense, at the same
total.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from thinwire.layout import Axis, ParameterInfo, SlotRows, describe_module, resolve_axis, rows_along
from thinwire.plan.policy import Rule, rule
from thinwire.validate import check_axis, check_density


def layerwise_density(model: nn.Module, density: float, *, axis: Axis = "auto") -> list[Rule]:
    """Policy rules that spread `density` x all elements over the layers at an equal number of entries per row.

    1. Every parameter with two or more dimensions is cut into its rows; budget = density x their elements.
    2. Find the level k at which sum over rows of min(k, row length) meets the budget.
    3. Rows shorter than the level go dense; the others get density = level / length.

    `axis` says how the method will cut parameters into rows, as in `tw.ADTopK`.

    >>> handle = tw.attach(ddp, tw.ADTopK(), policy=tw.layerwise_density(model, 0.01))
    """
    check_density("density", density)
    check_axis("axis", axis)
    infos = [
        info for _, info in describe_module(model).values() if len(info.shape) > 1 and info.numel
    ]
    rows = [rows_of(info, axis) for info in infos]
    level = water_level(
        [(r.count, r.length) for r in rows], density * sum(r.count * r.length for r in rows)
    )
    return [
        rule(escape(info.name), dense=True)
        if r.length <= level
        else rule(escape(info.name), density=level / r.length)
        for info, r in zip(infos, rows, strict=True)
    ]


def rows_of(info: ParameterInfo, axis: Axis) -> SlotRows:
    slot = info.slot(0)
    return rows_along(slot, resolve_axis(slot, axis), 1.0)


def water_level(rows: Sequence[tuple[int, int]], budget: float) -> float:
    """The k with sum of count x min(k, length) = budget, for (count, length) pairs; at least 1, the least a row sends."""
    remaining = budget
    open_rows = sum(count for count, _ in rows)
    for count, length in sorted(rows, key=lambda pair: pair[1]):
        level = remaining / open_rows
        if level < length:
            return max(1.0, level)
        remaining -= count * length
        open_rows -= count
    return max(1.0, float(max((length for _, length in rows), default=1)))


def escape(name: str) -> str:
    """A glob that matches this name only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
