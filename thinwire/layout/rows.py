"""Rows: the pieces of a parameter inside which entries compete, and a table of them for many slots.

A row is a set of elements at `offset + j * stride`, j < length, of a flat buffer. All-dimension top-k has one
row per fibre of the selection axis, traditional top-k one row per tensor; nothing after selection needs to
know which it was. An entry's index counts inside its row, so it usually fits 16 bits on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.layout.slots import Slot, SlotKind

Axis = Literal["auto", "published"] | int
WHOLE_TENSOR = "tensor"
FLATTEN_OUTPUT = "flatten"
T = TypeVar("T")


@dataclass(frozen=True)
class SlotRows:
    """The rows of one slot, all of the same length and stride, and how many entries each sends at most."""

    slot: Slot
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    length: int
    stride: int
    keep: int
    what: str

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def entries(self) -> int:
        return self.count * self.keep

    def matrix(self, flat: Tensor) -> Tensor:
        """View of the rows in `flat`, with the elements of a row on the last dimension."""
        return flat.as_strided(
            (*self.sizes, self.length),
            (*self.strides, self.stride),
            flat.storage_offset() + self.slot.offset,
        )

    def at(self, slot: Slot) -> SlotRows:
        """The same rows for the slot placed elsewhere."""
        return replace(self, slot=slot)

    def keeping(self, keep: int) -> SlotRows:
        """The same rows with another number of places each."""
        return replace(self, keep=keep)

    def row_offsets(self) -> Tensor:
        offsets = torch.tensor([self.slot.offset], dtype=torch.int64)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
        return offsets


def keep_count(length: int, density: float) -> int:
    """k = max(1, floor(length x density)), in decimal arithmetic: 0.29 of 100 is 29, not 28."""
    return max(1, math.floor(Fraction(str(density)) * length))


def resolve_axis(slot: Slot, axis: Axis) -> int | str:
    """The axis a slot is selected along; a convolution may be flattened to [out, rest]."""
    if isinstance(axis, int):
        return _checked_axis(slot, axis)
    if axis == "published":
        return _checked_axis(slot, 1)
    if slot.kind is SlotKind.EMBEDDING or slot.kind is SlotKind.TRANSPOSED_LINEAR:
        # Along the vocabulary: rows of tokens absent from the batch are zero and must not cost entries.
        # GPT-2's Conv1D is [in, out], so its inputs are on axis 0 too.
        return 0
    if slot.kind is SlotKind.CONV:
        if _rest_is_one_piece(slot):
            return FLATTEN_OUTPUT
        return max(range(len(slot.shape)), key=lambda dim: slot.shape[dim])
    return len(slot.shape) - 1


def _checked_axis(slot: Slot, axis: int) -> int:
    ndim = len(slot.shape)
    if not -ndim <= axis < ndim:
        raise UsageError(
            f"axis is {axis}; parameter {slot.name!r} of shape {list(slot.shape)} has axes {-ndim} to {ndim - 1}"
        )
    return axis % ndim


def rows_along(slot: Slot, axis: int | str, density: float) -> SlotRows:
    """Cut a slot into rows: along one axis, [out, rest], or as a whole."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    if axis == WHOLE_TENSOR:
        # A dense tensor is one contiguous piece of memory whatever its strides, so its row runs in memory order.
        sizes, strides, length, stride, what = (), (), slot.numel, 1, "whole tensor"
    elif axis == FLATTEN_OUTPUT:
        sizes, strides = (slot.shape[0],), (slot.strides[0],)
        length, stride, what = slot.numel // slot.shape[0], 1, "output rows, rest flattened"
    else:
        assert isinstance(axis, int)
        others = [dim for dim in range(len(slot.shape)) if dim != axis]
        sizes = tuple(slot.shape[dim] for dim in others)
        strides = tuple(slot.strides[dim] for dim in others)
        length, stride, what = slot.shape[axis], slot.strides[axis], f"fibres along axis {axis}"
    return SlotRows(slot, sizes, strides, length, stride, keep_count(length, density), what)


def rows_in_chunks(slot: Slot, chunk: int, density: float) -> SlotRows:
    """Cut a slot into equal pieces of memory, each of at most `chunk` elements; the whole slot if none divide it."""
    lengths = range(min(chunk, slot.numel), chunk // 4, -1)
    length = next((length for length in lengths if slot.numel % length == 0), slot.numel)
    if length == slot.numel:
        return rows_along(slot, WHOLE_TENSOR, density)
    count = slot.numel // length
    what = f"chunks of {length}"
    return SlotRows(slot, (count,), (length,), length, 1, keep_count(length, density), what)


def _rest_is_one_piece(slot: Slot) -> bool:
    """Whether each index of dim 0 owns one contiguous piece of memory (true for contiguous and channels_last)."""
    return slot.shape[0] == 1 or slot.strides[0] == slot.numel // slot.shape[0]


class RowTable:
    """The rows of all slots of a group: the geometry that encode, wire and decode share.

    Entries are ordered by slot, then row, then rank inside the row, so that position e of any payload means
    the same row on every rank and only the index inside the row has to travel.
    """

    def __init__(self, rows: Sequence[SlotRows], numel: int) -> None:
        self.rows = tuple(rows)
        self.numel = numel
        self.entries = sum(r.entries for r in rows)
        self.entry_starts = [0]
        for r in rows:
            self.entry_starts.append(self.entry_starts[-1] + r.entries)
        self._device_tables: dict[torch.device, tuple[Tensor, ...]] = {}

    @cached_property
    def signature(self) -> int:
        """A checksum of the geometry; payloads carry it, so that differing layouts are refused, not misread."""
        value = 0
        for r in self.rows:
            for number in (*map(ord, r.slot.name), r.count, r.length, r.stride, r.keep):
                value = (value * 1_000_003 + number) & 0x7FFFFFFF
        return value

    def slot_slice(self, index: int) -> slice:
        """The entries of the `index`-th slot."""
        return slice(self.entry_starts[index], self.entry_starts[index + 1])

    def _tables(self, device: torch.device) -> tuple[Tensor, ...]:
        """Per entry: flat offset of its row, stride of its row, slot number, row length, place in its slot."""
        if device not in self._device_tables:
            columns = (
                [r.row_offsets().repeat_interleave(r.keep) for r in self.rows],
                [torch.full((r.entries,), r.stride) for r in self.rows],
                [torch.full((r.entries,), index) for index, r in enumerate(self.rows)],
                [torch.full((r.entries,), r.length) for r in self.rows],
                [torch.arange(r.entries) for r in self.rows],
            )
            self._device_tables[device] = tuple(
                torch.cat(parts).to(device, torch.int32) for parts in columns
            )
        return self._device_tables[device]

    def positions(self, indices: Tensor) -> Tensor:
        """Flat positions of row-local indices, one per entry."""
        bases, strides, *_ = self._tables(indices.device)
        return bases + indices.long() * strides

    def entry_slots(self, device: torch.device) -> Tensor:
        """Slot number of each entry."""
        return self._tables(device)[2]

    def row_lengths(self, device: torch.device) -> Tensor:
        """Row length of each entry: the exclusive bound of its index."""
        return self._tables(device)[3]

    def entry_places(self, device: torch.device) -> Tensor:
        """Place of each entry among those of its slot."""
        return self._tables(device)[4]


_made: WeakKeyDictionary[RowTable, dict[Hashable, Any]] = WeakKeyDictionary()


def remembered(table: RowTable, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns, made once per row table and key; gone with the table."""
    shelf = _made.setdefault(table, {})
    if key not in shelf:
        shelf[key] = make()
    return shelf[key]
