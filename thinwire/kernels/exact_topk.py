"""Exact top-k of every row of a table: one call per bucket, the fast way of each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.kernels.cuda.long_rows import LongRows
from thinwire.kernels.cuda.row_select import LONGEST, RowSelect
from thinwire.kernels.cuda.toolchain import Toolchain, kernels_for
from thinwire.kernels.topk import row_topk
from thinwire.kernels.tournament import Strip, Tournament, pays

if TYPE_CHECKING:
    from thinwire.layout import RowTable, SlotRows


class Selection(Protocol):
    """Some rows of a table, selected together."""

    def select(self, c: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write the chosen row-local indices and what c has there, each at its entry of the table."""


def exact_topk(c: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
    """(int64 [entries], [entries]): the `keep` largest magnitudes of every row, by row-local index and value.

    Ascending indices inside the row, ties to the lowest.
    """
    toolchain = kernels_for(c.device) if c.dtype == torch.float32 else None
    plans = _plans.setdefault(table, {})
    key = (c.dtype, c.device, toolchain)
    if key not in plans:
        plans[key] = make_plan(table, *key)
    indices = torch.empty(table.entries, dtype=torch.int64, device=c.device)
    values = torch.empty(table.entries, dtype=c.dtype, device=c.device)
    for selection in plans[key]:
        selection.select(c, indices, values)
    return indices, values


Plan = Sequence[Selection]
_plans: WeakKeyDictionary[
    RowTable, dict[tuple[torch.dtype, torch.device, Toolchain | None], Plan]
] = WeakKeyDictionary()


def make_plan(
    table: RowTable, dtype: torch.dtype, device: torch.device, toolchain: Toolchain | None
) -> Plan:
    """All rows of the table, in as few selections as possible."""
    plan: list[Selection] = []
    others = [index for index, rows in enumerate(table.rows) if rows.entries]
    if toolchain is not None:
        short = [index for index in others if table.rows[index].length <= LONGEST]
        slots = [(table.rows[index], table.entry_starts[index]) for index in short]
        plan += [RowSelect(toolchain, slots, device)] if slots else []
        others = [index for index in others if index not in set(short)]
        whole = [index for index in others if table.rows[index].count == 1]
        plan += [LongRows(table, whole, device)] if whole else []
        others = [index for index in others if index not in set(whole)]
    elif device.type == "cpu":
        tournaments = plan_tournaments(table, others, dtype)
        plan += tournaments
        taken = {index for tournament in tournaments for index in tournament.members}
        others = [index for index in others if index not in taken]
    return [*plan, *group_alike(table, others, device)]


@dataclass(frozen=True, eq=False)
class AlikeRows:
    """Rows of one length and `keep`, by torch."""

    slots: Sequence[SlotRows]
    places: Tensor
    """int64: where their entries are in the table."""

    def select(self, c: Tensor, indices: Tensor, values: Tensor) -> None:
        first = self.slots[0]
        parts = [rows.matrix(c).reshape(-1, first.length) for rows in self.slots]
        matrix = parts[0] if len(parts) == 1 else torch.cat(parts)
        chosen = row_topk(matrix, first.keep)
        indices.index_copy_(0, self.places, chosen.reshape(-1))
        values.index_copy_(0, self.places, matrix.gather(-1, chosen).reshape(-1))


SELECTED_TOGETHER = 1 << 22
"""About how many elements one call selects from: more would not save time any more, and need memory."""


def group_alike(table: RowTable, members: Sequence[int], device: torch.device) -> list[AlikeRows]:
    """Some slots of a table, those with rows of one length and `keep` together."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    so_far: dict[tuple[int, int], int] = {}
    for index in members:
        rows = table.rows[index]
        kind = (rows.length, rows.keep)
        alike.setdefault((*kind, so_far.get(kind, 0) // SELECTED_TOGETHER), []).append(index)
        so_far[kind] = so_far.get(kind, 0) + rows.slot.numel
    groups = []
    for chosen in alike.values():
        spans = [table.slot_slice(index) for index in chosen]
        places = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        groups.append(AlikeRows([table.rows[index] for index in chosen], places.to(device)))
    return groups


@dataclass(frozen=True, eq=False)
class TournamentRows:
    """Rows of one length, stride and `keep` on the CPU."""

    tournament: Tournament
    members: Sequence[int]
    """Numbers of their slots."""
    spans: Sequence[slice]
    """Where the entries of each slot are in the table."""

    def select(self, c: Tensor, indices: Tensor, values: Tensor) -> None:
        # Without the bookkeeping for autograd its many small calls cost a fifth less.
        with torch.inference_mode():
            found, there = (chosen.view(-1) for chosen in self.tournament.run(c))
        sizes = [span.stop - span.start for span in self.spans]
        parts = zip(self.spans, found.split(sizes), there.split(sizes), strict=True)
        for span, some, their in parts:
            indices[span], values[span] = some, their


def plan_tournaments(
    table: RowTable, members: Sequence[int], dtype: torch.dtype
) -> list[TournamentRows]:
    """Slots whose rows have one length, stride and `keep` together, where that pays."""
    alike: dict[tuple[int, int, int], dict[int, Strip]] = {}
    for index in members:
        rows = table.rows[index]
        strip = strip_of(rows)
        if strip is not None:
            alike.setdefault((rows.length, rows.stride, rows.keep), {})[index] = strip
    return [
        TournamentRows(
            Tournament(list(strips.values()), length, keep),
            list(strips),
            [table.slot_slice(index) for index in strips],
        )
        for (length, _, keep), strips in alike.items()
        if pays(length * sum(strip.rows for strip in strips.values()), length, keep, dtype)
    ]


def strip_of(rows: SlotRows) -> Strip | None:
    """The rows as a regular strip of the buffer, if they are one."""
    outer, left_over = divmod(rows.count, rows.stride)
    if left_over:
        return None
    bases = rows.row_offsets()
    pitch = int(bases[rows.stride] - bases[0]) if outer > 1 else rows.length * rows.stride
    strip = Strip(rows.slot.offset, outer, pitch, inner=rows.stride)
    return strip if torch.equal(strip.bases(), bases) else None
