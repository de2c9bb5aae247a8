"""Group: the slots of one bucket that travel together, laid out in a flat buffer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.layout.slots import BucketLayout, Slot

# Elements; keeps every slot aligned for 16-byte loads.
SLOT_ALIGNMENT = 4


class Cuts:
    """Pieces of a flat buffer, given as (offset, elements): all of them by one split instead of an operation each."""

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        self._sizes: list[int] = []
        self._wanted: list[int] = []
        at = 0
        order = sorted(range(len(pieces)), key=lambda index: pieces[index][0])
        places = {}
        for index in order:
            offset, numel = pieces[index]
            if offset > at:
                self._sizes.append(offset - at)
            places[index] = len(self._sizes)
            self._sizes.append(numel)
            at = offset + numel
        self._wanted = [places[index] for index in range(len(pieces))]
        self._end = at

    def of(self, flat: Tensor) -> list[Tensor]:
        rest = flat.numel() - self._end
        parts = flat.split_with_sizes([*self._sizes, rest] if rest else self._sizes)
        return [parts[index] for index in self._wanted]


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
        return Cuts([(slot.offset, slot.numel) for slot in self.sources])

    @cached_property
    def _slot_cuts(self) -> Cuts:
        return Cuts([(slot.offset, slot.numel) for slot in self.slots])

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
