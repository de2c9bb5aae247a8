"""Group: the slots of one bucket that travel together, laid out in a flat buffer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.layout import BucketLayout, Slot

# Elements; keeps every slot aligned for 16-byte loads.
SLOT_ALIGNMENT = 4


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
        return [slot.span(bucket_flat) for slot in self.sources]

    def deliver(self, update: Tensor, bucket_flat: Tensor) -> None:
        """Write the group's flat update into the bucket (cast to its dtype)."""
        if self.sources:
            torch._foreach_copy_(
                self.pieces(bucket_flat), [slot.span(update) for slot in self.slots]
            )

    def rounding(self, update: Tensor, bucket_flat: Tensor) -> Tensor:
        """What `deliver` lost by casting to the bucket's dtype, in the group's own layout."""
        lost = update.clone()
        torch._foreach_sub_(
            [slot.span(lost) for slot in self.slots],
            [piece.to(update.dtype) for piece in self.pieces(bucket_flat)],
        )
        return lost
