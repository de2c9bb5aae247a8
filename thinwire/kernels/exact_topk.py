"""Exact top-k of every row of a table: one call per bucket, the fast way of each device."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.kernels.topk import row_topk
from thinwire.kernels.tournament import Strip, Tournament, pays

if TYPE_CHECKING:
    from thinwire.kernels.row_select import Launch
    from thinwire.select.rows import RowTable, SlotRows

logger = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Whether the CUDA kernels can be used; says so once if not."""
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "triton is not installed; selection on CUDA falls back to torch and is many times slower"
        )
        return False
    return True


def exact_topk(c: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
    """(int64 [entries], [entries]): the `keep` largest magnitudes of every row, by row-local index and value.

    Ascending indices inside the row, ties to the lowest.
    """
    if c.device.type == "cpu" and c.is_contiguous():
        return select_by_tournaments(c, table)
    if c.is_cuda and c.dtype == torch.float32 and has_triton():
        indices = select_with_kernel(c, table)
    else:
        parts = [row_topk(rows.matrix(c), rows.keep).reshape(-1) for rows in table.rows]
        indices = torch.cat([torch.zeros(0, dtype=torch.int64, device=c.device), *parts])
    return indices, c[table.positions(indices)]


@dataclass(frozen=True, eq=False)
class AlikeRows:
    """Rows of one length and `keep` that are selected in one call."""

    slots: Sequence[SlotRows]
    places: Tensor
    """int64: where their entries are in the table."""

    def select(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """(the rows [rows, length], the chosen indices [rows, keep])."""
        first = self.slots[0]
        parts = [rows.matrix(c).reshape(-1, first.length) for rows in self.slots]
        matrix = parts[0] if len(parts) == 1 else torch.cat(parts)
        return matrix, row_topk(matrix, first.keep)


SELECTED_TOGETHER = 1 << 22
"""About how many elements one call selects from: more would not save time any more, and need memory."""


def group_alike(
    table: RowTable, members: Sequence[int], device: torch.device | None = None
) -> list[AlikeRows]:
    """Some slots of a table, those with rows of one length and `keep` together; without those that have no entry."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    so_far: dict[tuple[int, int], int] = {}
    for which in members:
        rows = table.rows[which]
        if not rows.entries:
            continue
        kind = (rows.length, rows.keep)
        alike.setdefault((*kind, so_far.get(kind, 0) // SELECTED_TOGETHER), []).append(which)
        so_far[kind] = so_far.get(kind, 0) + rows.slot.numel
    groups = []
    for chosen in alike.values():
        spans = [table.slot_slice(which) for which in chosen]
        places = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        groups.append(AlikeRows([table.rows[which] for which in chosen], places.to(device)))
    return groups


# -- on the CPU -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """Which slots of a table compete in which tournament, and the others."""

    tournaments: Sequence[tuple[Tournament, Sequence[int]]]
    others: Sequence[AlikeRows]


def select_by_tournaments(c: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
    """One tournament for all rows of a kind, so that many tensors cost few calls."""
    plans = _plans.setdefault(table, {})
    if c.dtype not in plans:
        plans[c.dtype] = make_plan(table, c.dtype)
    indices = torch.empty(table.entries, dtype=torch.int64)
    values = torch.empty(table.entries, dtype=c.dtype)
    for tournament, members in plans[c.dtype].tournaments:
        # Without the bookkeeping for autograd its many small calls cost a fifth less.
        with torch.inference_mode():
            found, there = (chosen.view(-1) for chosen in tournament.run(c))
        entries = [table.rows[which].entries for which in members]
        for which, some, their in zip(
            members, found.split(entries), there.split(entries), strict=True
        ):
            places = table.slot_slice(which)
            indices[places], values[places] = some, their
    for alike in plans[c.dtype].others:
        matrix, chosen = alike.select(c)
        indices.index_copy_(0, alike.places, chosen.reshape(-1))
        values.index_copy_(0, alike.places, matrix.gather(-1, chosen).reshape(-1))
    return indices, values


def make_plan(table: RowTable, dtype: torch.dtype) -> Plan:
    """Slots whose rows have one length, stride and `keep` together, where that pays."""
    alike: dict[tuple[int, int, int], dict[int, Strip]] = {}
    for which, rows in enumerate(table.rows):
        strip = strip_of(rows)
        if strip is not None:
            alike.setdefault((rows.length, rows.stride, rows.keep), {})[which] = strip
    tournaments = [
        (Tournament(list(strips.values()), length, keep), list(strips))
        for (length, _, keep), strips in alike.items()
        if pays(length * sum(strip.rows for strip in strips.values()), length, keep, dtype)
    ]
    taken = {which for _, members in tournaments for which in members}
    others = [which for which in range(len(table.rows)) if which not in taken]
    return Plan(tournaments, group_alike(table, others))


def strip_of(rows: SlotRows) -> Strip | None:
    """The rows as a regular strip of the buffer, if they are one."""
    outer, left_over = divmod(rows.count, rows.stride)
    if left_over:
        return None
    bases = rows.row_offsets()
    pitch = int(bases[rows.stride] - bases[0]) if outer > 1 else rows.length * rows.stride
    strip = Strip(rows.slot.offset, outer, pitch, inner=rows.stride)
    return strip if torch.equal(strip.bases(), bases) else None


_plans: WeakKeyDictionary[RowTable, dict[torch.dtype, Plan]] = WeakKeyDictionary()


# -- with the Triton kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CudaPlan:
    """How the rows of a table are selected."""

    launches: Sequence[Launch]
    long: Sequence[AlikeRows]


def select_with_kernel(c: Tensor, table: RowTable) -> Tensor:
    """Rows that fit a tile in one launch per tile shape, the few long ones by torch."""
    from thinwire.kernels.row_select import select_rows

    if table not in _cuda_plans:
        _cuda_plans[table] = plan_for_cuda(table, c.device)
    plan = _cuda_plans[table]
    indices = torch.empty(table.entries, dtype=torch.int32, device=c.device)
    select_rows(c, plan.launches, indices)
    for alike in plan.long:
        _, chosen = alike.select(c)
        indices.index_copy_(0, alike.places, chosen.reshape(-1).int())
    return indices.long()


def plan_for_cuda(table: RowTable, device: torch.device) -> CudaPlan:
    from thinwire.kernels.row_select import plan_launches, tile_of

    fits = [tile_of(rows) is not None for rows in table.rows]
    short = [
        (rows, first)
        for rows, first, fit in zip(table.rows, table.entry_starts, fits, strict=False)
        if fit
    ]
    long = [which for which, fit in enumerate(fits) if not fit]
    return CudaPlan(plan_launches(short, device), group_alike(table, long, device))


_cuda_plans: WeakKeyDictionary[RowTable, CudaPlan] = WeakKeyDictionary()
