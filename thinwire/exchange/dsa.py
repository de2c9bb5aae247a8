"""TopkDSA: split and reduce, then gather every sum, or whole regions once there are too many.

Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning" (SC'19), in the form that Ok-Topk is
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.exchange.base import Offer
from thinwire.exchange.common import any_non_finite, slot_of, to_wire
from thinwire.exchange.places import Places
from thinwire.exchange.regions import HashedRegions
from thinwire.exchange.requests import Gather, Program, common
from thinwire.exchange.split import SPLIT_ENTRIES, OwnedSums, SplitStep
from thinwire.layout import RowTable, SlotRows, remembered
from thinwire.validate import check_density


@dataclass(frozen=True, kw_only=True)
class SplitGather(OwnedSums):
    """Split and reduce, then all sums come back: 2 (capacity/P + 1) k (P-1) words on every step, or once P k is `dense_above` x n
    (2 capacity k + n) (P-1)/P. Messages are never longer than that, however different the ranks' choices and the layers' scales.

    1. Send each selected entry to the owner of its place, at most `capacity` x k/P per slot and owner, largest first; the rest stays
       in memory.
    2. Owners add in rank order.
    3. Each owner's sums are gathered, at most k of every slot. If even so many of all owners may be more than `dense_above` x n, whole
       regions are. That depends on the shapes in a bucket alone.
    4. What was sent and is not in a sum that came back returns to memory.

    The update has up to P k entries. The published form has an even split, whose busiest owner all others wait for, and lengths that
    the host reads.
    """

    dense_above: float = 1 / 3
    """Share of the elements from which on regions travel dense."""

    form = SPLIT_ENTRIES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density("dense_above", self.dense_above)

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        # Where entries travel they always pay; about this is what regions cost where they hardly do any more.
        return 2 * (32 + value_bits) * (world - 1) / world

    def slot_bits(self, rows: SlotRows, value_bits: float, index_bits: float, world: int) -> float:
        entry, k = 32 + value_bits, rows.entries
        many = world * k >= self.dense_above * rows.slot.numel
        back = value_bits * rows.slot.numel / world if many else entry * k
        return (self.capacity * entry * k / world + back) * (world - 1)

    @property
    def gathered_after(self) -> int | None:
        return 1

    def places(self, table: RowTable, regions: HashedRegions, world: int) -> tuple[Places, Places]:
        out, _ = super().places(table, regions, world)
        return out, Places(regions, [rows.entries for rows in table.rows], world)

    def winners(self, table: RowTable) -> None:
        return None

    def objection_to_kernels(self, table: RowTable, world: int) -> str | None:
        return "regions that travel dense" if self.goes_dense(table, world) else None

    def goes_dense(self, table: RowTable, world: int) -> bool:
        return world * table.entries >= self.dense_above * table.numel

    def step(self, offer: Offer) -> SplitStep:
        dense = self.goes_dense(offer.codec.table, offer.place.world)
        return RegionStep(self, offer) if dense else SplitStep(self, offer)


class RegionStep(SplitStep):
    """One exchange of one group whose sums come back as whole regions."""

    def gather(
        self, sums: Tensor, indices: Tensor, used: Tensor
    ) -> Program[tuple[Tensor, Tensor, Tensor]]:
        exact = sums[1:]
        rounded = to_wire(exact, self.wire)
        raw = rounded.view(torch.uint8)
        message = pad(raw, (0, -len(raw) % 4))
        padding = len(message) - self.table.numel * self.wire.itemsize // self.world
        request = Gather(message, f"{self.phase}/regions", padding_bytes=padding, apart=True)
        (gathered,) = yield (request,)
        regions = gathered[:, : len(raw)].contiguous().view(self.wire)
        update, kept, bad = yield from common(lambda: self.read_regions(regions, used))
        if self.wire != self.sum_dtype:
            self.bank_region(exact - rounded, used)
        return update, kept, bad

    def read_regions(self, regions: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, mask of the positions that are kept, whether one is not finite) out of all owners' numbers [world, region]."""
        flat = torch.arange(self.table.numel, device=self.device)
        slots = slot_of(flat, self.table)
        lasts = [rows.slot.offset + rows.slot.numel - 1 for rows in self.table.rows]
        last = remembered(
            self.table, ("lasts", self.device), lambda: torch.tensor(lasts, device=self.device)
        )[slots]
        box, index = self.regions.locate(torch.minimum(flat, last), slots)
        owner = box // len(self.table.rows)
        numbers = regions.view(-1)[owner * self.regions.size + index].to(self.sum_dtype)
        kept = used[slots]
        means = torch.where(kept & (flat <= last), numbers, 0.0) * (1 / self.world)
        return means, kept, any_non_finite(means)

    def bank_region(self, lost: Tensor, used: Tensor) -> None:
        regions = self.regions
        index = torch.arange(regions.size, device=self.device)
        slots = torch.bucketize(index, regions.edges[1:], right=True)
        owner = torch.full_like(index, self.rank)
        positions = regions.positions(owner, index, regions.lookup(slots))
        lost = torch.where(used[slots] & lost.isfinite(), lost, 0.0)
        # Nothing has been added up beyond the end of a slot.
        self.offer.account.give_back(positions.clamp(max=self.table.numel - 1), lost)
