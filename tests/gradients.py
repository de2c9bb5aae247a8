"""Slots and gradients for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.layout import Shard, Slot, SlotKind, contiguous_strides


def slot_of(
    name: str, shape: Sequence[int], kind: SlotKind = SlotKind.LINEAR, offset: int = 0
) -> Slot:
    """A contiguous slot."""
    return Slot(name, tuple(shape), contiguous_strides(shape), offset, kind, Shard(tuple(shape)))
