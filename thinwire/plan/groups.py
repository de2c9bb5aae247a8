"""Group: the slots of one bucket that travel together, laid out in a flat buffer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.layout import BucketLayout, Slot

# Elements; keeps every slot aligned for 16-byte loads.
SLOT_ALIGNMENT = 4


class Cuts:
    """Where slots lie in a flat buffer: all of them by one split instead of an operation each."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._sizes: list[int] = []
        self._wanted: list[int] = []
        at = 0
        order = sorted(range(len(slots)), key=lambda which: slots[which].offset)
        places = {}
        for which in order:
            slot = slots[which]
            if slot.offset > at:
                self._sizes.append(slot.offset - at)
            places[which] = len(self._sizes)
            self._sizes.append(slot.numel)
            at = slot.offset + slot.numel
        self._wanted = [places[which] for which in range(len(slots))]
        self._end = at

    def of(self, flat: Tensor) -> list[Tensor]:
        rest = flat.numel() - self._end
        parts = flat.split_with_sizes([*self._sizes, rest] if rest else self._sizes)
        return [parts[which] for which in self._wanted]


@dataclass(frozen=True, eq=False)
class Group:
    """`sources` say where the slots lie in the bucket, `slots` where in the group's own buffer.

    Compared by identity: one group per (bucket layout, plan).
    """

    sources: tuple[Slot, ...]
    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layout: BucketLayout, members: Sequence[Slot], dtype: torch.dtype) -> Group:
        placed: list[Slot] = []
        offset = 0
        for slot in members:
            placed.append(slot.at(offset))
            offset += -(-slot.numel // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return cls(tuple(members), tuple(placed), offset, dtype, layout.device)

    def pieces(self, bucket_flat: Tensor) -> list[Tensor]:
        """The group's slots in the bucket, each as a 1-D piece in memory order."""
        return self._source_cuts.of(bucket_flat)

    def spans(self, flat: Tensor) -> list[Tensor]:
        """The slots in the group's own buffer, each as a 1-D piece in memory order."""
        return self._slot_cuts.of(flat)

    @cached_property
    def _source_cuts(self) -> Cuts:
        return Cuts(self.sources)

    @cached_property
    def _slot_cuts(self) -> Cuts:
        return Cuts(self.slots)

    def deliver(self, update: Tensor, bucket_flat: Tensor) -> None:
        """Write the group's flat update into the bucket (cast to its dtype)."""
        if self.sources:
            torch._foreach_copy_(self.pieces(bucket_flat), self.spans(update))

    def rounding(self, update: Tensor, bucket_flat: Tensor) -> Tensor:
        """What `deliver` lost by casting to the bucket's dtype, in the group's own layout."""
        lost = update.clone()
        torch._foreach_sub_(
            self.spans(lost),
            [piece.to(update.dtype) for piece in self.pieces(bucket_flat)],
        )
        return lost
