"""The packed payload: header, values and indices of one group of slots in one uint8 buffer.

    int32 words   0 version | 1 flags | 2 slots | 3 entries | 4 checksum of geometry and codes
                  then per slot: count, had-a-gradient, selection notes (float32 bits)
    bytes         values, then indices, each section aligned for typed views

Every rank's payload of a step has the same length, known from shapes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.described import Described
from thinwire.errors import WireError
from thinwire.layout import RowTable
from thinwire.wire.indices import IndexCode
from thinwire.wire.values import ValueCode

if TYPE_CHECKING:
    from thinwire.select.base import Picks

WIRE_VERSION = 0x74570001
NON_FINITE = 1
FIXED_WORDS = 5
FLAGS_WORD = 1
"""Of the fixed ones."""
MEANINGS = ("version", "unknown flags", "number of slots", "number of entries", "format checksum")
SLOT_WORDS = 2
HAD_WORD = 1
"""Of a slot's."""
ALIGNMENT = 16


@dataclass(frozen=True)
class Header(Described):
    """What all ranks said beside their entries; first dimension = rank."""

    non_finite: Tensor
    """bool [world]"""
    counts: Tensor
    """int32 [world, slots]"""
    had_gradient: Tensor
    """bool [world, slots]"""
    notes: Tensor
    """float32 [world, slots, note_words]"""


@dataclass(frozen=True)
class Flags(Described):
    """What a rank knows of its own gradient before it encodes."""

    non_finite: Tensor
    """bool []"""
    had_gradient: Tensor
    """bool [slots]"""


@dataclass(frozen=True)
class Constants:
    """What shapes alone tell, on one device."""

    fixed_words: Tensor
    """int32 [FIXED_WORDS]: the header's start without flags"""
    full_counts: Tensor
    """int32 [slots]: places of each slot"""
    entry_rows: Tensor
    """int64 [entries]: row of each entry; empty if the index code takes any order"""
    entry_places: Tensor
    """int64 [entries]: place of each entry in its slot; empty if the value code has a zero"""


class Codec:
    """One payload format: the codes of `values` and of `indices` over the rows of a `table`.

    `note_words` are float32 numbers per slot that a selection adds to the header.
    """

    def __init__(
        self, table: RowTable, values: ValueCode, indices: IndexCode, note_words: int = 0
    ) -> None:
        self.table = table
        self.values = values
        self.indices = indices
        self.note_words = note_words
        self.header_words = FIXED_WORDS + len(table.rows) * (SLOT_WORDS + note_words)
        self.values_at = _aligned(4 * self.header_words)
        self.indices_at = self.values_at + _aligned(values.nbytes(table))
        self.nbytes = self.indices_at + _aligned(indices.nbytes(table))
        entry_bits = sum(r.entries * (values.bits + indices.bits(r)) for r in table.rows)
        self.control_bytes = self.nbytes - int(entry_bits // 8)
        codes = zlib.crc32(f"{values.name}/{indices.name}/{note_words}".encode())
        self.signature = (table.signature ^ codes) & 0x7FFFFFFF
        self._full_counts = torch.tensor([r.entries for r in table.rows], dtype=torch.int32)
        fixed = [WIRE_VERSION, 0, len(table.rows), table.entries, self.signature]
        self._fixed_words = torch.tensor(fixed, dtype=torch.int32)
        self._entry_rows = _entry_rows(table if indices.ordered else None)
        self._entry_places = _entry_places(None if values.has_zero else table)
        self._on_device: dict[torch.device, Constants] = {}

    def _constants(self, device: torch.device) -> Constants:
        """Copied to each device once, because a copy makes the host wait."""
        if device not in self._on_device:
            tensors = (self._fixed_words, self._full_counts, self._entry_rows, self._entry_places)
            self._on_device[device] = Constants(*(tensor.to(device) for tensor in tensors))
        return self._on_device[device]

    def fixed_header(self) -> Tensor:
        """int32 [header words] on the CPU: what shapes alone tell, every place taken, no flags."""
        words = torch.zeros(self.header_words, dtype=torch.int32)
        words[:FIXED_WORDS] = self._fixed_words
        self._slot_words(words)[:, 0] = self._full_counts
        return words

    def encode(self, picks: Picks, flags: Flags) -> tuple[Tensor, Tensor]:
        """(payload, the values as every rank will decode them)."""
        device = picks.values.device
        payload = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._write_header(payload, picks, flags)
        values, indices, order = self._arrange(picks)
        raw_values = self.values.encode(values, self.table)
        payload[self.values_at : self.values_at + raw_values.numel()] = raw_values
        raw_indices = self.indices.encode(indices, self.table)
        payload[self.indices_at : self.indices_at + raw_indices.numel()] = raw_indices
        decoded = self.values.decode(raw_values, self.table)
        if picks.counts is not None:
            decoded = self._clear_left_over(decoded, picks.counts)
        if order is None:
            return payload, decoded
        return payload, torch.empty_like(decoded).index_copy_(0, order, decoded)

    def _arrange(self, picks: Picks) -> tuple[Tensor, Tensor, Tensor | None]:
        """(values, indices, order) with the entries of every row ascending if the index code wants it so.

        Places left over add nothing wherever they are, so they go to the end of their row.
        """
        if not self.indices.ordered or not self.table.entries:
            return picks.values, picks.indices, None
        indices = picks.indices.long()
        if picks.counts is not None:
            last = self.table.row_lengths(indices.device).long() - 1
            indices = torch.where(picks.values == 0, last, indices)
        longest = max(r.length for r in self.table.rows)
        keys = self._constants(indices.device).entry_rows * longest + indices
        if keys.device.type == "cpu" and bool((keys[1:] >= keys[:-1]).all()):
            return picks.values, indices, None
        order = keys.argsort(stable=True)
        return picks.values[order], indices[order], order

    def _write_header(self, payload: Tensor, picks: Picks, flags: Flags) -> None:
        words = payload[: 4 * self.header_words].view(torch.int32)
        known = self._constants(payload.device)
        words[:FIXED_WORDS] = known.fixed_words
        words[FLAGS_WORD] = (flags.non_finite | ~is_finite(picks.values)).to(
            torch.int32
        ) * NON_FINITE
        slots = words[FIXED_WORDS:].view(len(self.table.rows), SLOT_WORDS + self.note_words)
        slots[:, 0] = known.full_counts if picks.counts is None else picks.counts
        slots[:, HAD_WORD] = flags.had_gradient
        if self.note_words:
            assert picks.notes is not None
            slots[:, SLOT_WORDS:] = picks.notes.float().view(torch.int32)

    def read_headers(self, payloads: Tensor) -> Header:
        """Headers of all ranks from the gathered payloads [world, nbytes]; refuses what this codec did not write."""
        if payloads.shape[-1] != self.nbytes:
            raise WireError(
                f"payload has {payloads.shape[-1]} bytes where {self.nbytes} were agreed on"
            )
        words = payloads[:, : 4 * self.header_words].contiguous().view(torch.int32)
        slots = self._slot_words(words)
        counts = slots[..., 0]
        non_finite = (words[:, FLAGS_WORD] & NON_FINITE).bool()
        known = self._constants(words.device)
        differs = self._plain(words) != known.fixed_words
        miscounts = (counts < 0) | (counts > known.full_counts)
        if words.device.type == "cpu":
            self._check_header(words, differs, miscounts)
        else:
            # A host-side check would wait for the device; a corrupt header marks the step as bad instead.
            non_finite = non_finite | differs.any(1) | miscounts.any(1)
        return Header(
            non_finite=non_finite,
            counts=counts,
            had_gradient=slots[..., HAD_WORD].bool(),
            notes=slots[..., SLOT_WORDS:].contiguous().view(torch.float32),
        )

    def _slot_words(self, words: Tensor) -> Tensor:
        """[..., slots, SLOT_WORDS + note_words] of whole header words."""
        shape = (len(self.table.rows), SLOT_WORDS + self.note_words)
        return words[..., FIXED_WORDS:].unflatten(-1, shape)

    def _plain(self, words: Tensor) -> Tensor:
        """[world, FIXED_WORDS]: the fixed words without the flags that may differ."""
        plain = words[:, :FIXED_WORDS].clone()
        plain[:, FLAGS_WORD] &= ~NON_FINITE
        return plain

    def _check_header(self, words: Tensor, differs: Tensor, miscounts: Tensor) -> None:
        if bool(differs.any()):
            rank, word = differs.nonzero()[0].tolist()
            raise WireError(
                f"payload of rank {rank} has {MEANINGS[word]} {int(self._plain(words)[rank, word])}, "
                f"expected {int(self._fixed_words[word])}"
            )
        if bool(miscounts.any()):
            raise WireError("a payload header counts more entries than its slot has places")

    def sections(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of a payload's values, and those of its indices."""
        return (
            payload[self.values_at : self.values_at + self.values.nbytes(self.table)],
            payload[self.indices_at : self.indices_at + self.indices.nbytes(self.table)],
        )

    def flags_of(self, payload: Tensor) -> Flags:
        """What this rank itself wrote into a payload's header."""
        words = payload[: 4 * self.header_words].view(torch.int32)
        had = self._slot_words(words)[:, HAD_WORD].bool()
        return Flags((words[FLAGS_WORD] & NON_FINITE).bool(), had)

    def raise_non_finite(self, payload: Tensor, flag: Tensor) -> None:
        """Have a payload's header tell of something that is not finite if a flag (bool []) is up."""
        words = payload[: 4 * self.header_words].view(torch.int32)
        words[FLAGS_WORD].bitwise_or_(flag.to(torch.int32) * NON_FINITE)

    def decode(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """(flat positions, values) of one rank's payload; what `encode` cannot have written is refused."""
        if payload.numel() != self.nbytes:
            raise WireError(
                f"payload has {payload.numel()} bytes where {self.nbytes} were agreed on"
            )
        raw_values, raw_indices = self.sections(payload)
        header = payload[: 4 * self.header_words].view(torch.int32)
        values = self.values.decode(raw_values, self.table)
        values = self._clear_left_over(values, self._slot_words(header)[:, 0])
        indices = self.indices.decode(raw_indices, self.table)
        outside = (indices < 0) | (indices >= self.table.row_lengths(indices.device))
        if self.indices.ordered:
            outside[1:] |= self._repeated(indices, values)
        if payload.device.type == "cpu":
            if bool(outside.any()):
                raise WireError("a payload holds an index outside its row or twice the same")
            if not self.values.writes_nan and bool(values.isnan().any()):
                raise WireError(
                    f"a payload holds bits that the value code {self.values.name!r} never writes"
                )
        else:
            # No host wait on an accelerator: a corrupt entry becomes a NaN at a legal place, which every
            # rank decodes alike and which marks the step as bad.
            values = torch.where(outside, torch.nan, values)
            indices = torch.where(outside, 0, indices)
        return self.table.positions(indices), values

    def _clear_left_over(self, values: Tensor, counts: Tensor) -> Tensor:
        """Zeros at the last places of a slot, beyond its count, where the value code cannot say zero."""
        if self.values.has_zero:
            return values
        slots = self.table.entry_slots(values.device).long()
        taken = self._constants(values.device).entry_places < counts[slots]
        return torch.where(taken, values, 0.0)

    def _repeated(self, indices: Tensor, values: Tensor) -> Tensor:
        """bool [entries - 1]: whether an entry has the place of the one before and neither is left over."""
        rows = self._constants(indices.device).entry_rows
        same = (indices[1:] == indices[:-1]) & (rows[1:] == rows[:-1])
        return same & (values[1:] != 0) & (values[:-1] != 0)


def is_finite(values: Tensor) -> Tensor:
    """bool []: all of them; 0 times anything else is not 0. On a CPU `isfinite` takes eight times as long."""
    return (values * 0).sum() == 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _entry_rows(table: RowTable | None) -> Tensor:
    """int64 [entries]: the row of each entry, counted over the table; empty where nothing needs it."""
    parts, first = [torch.zeros(0, dtype=torch.int64)], 0
    for rows in table.rows if table is not None else ():
        parts.append((first + torch.arange(rows.count)).repeat_interleave(rows.keep))
        first += rows.count
    return torch.cat(parts)


def _entry_places(table: RowTable | None) -> Tensor:
    """int64 [entries]: the place of each entry in its slot; empty where nothing needs it."""
    parts = [torch.arange(rows.entries) for rows in table.rows] if table is not None else []
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
