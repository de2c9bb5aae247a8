"""The packed payload: header, values and indices of one group of slots in one uint8 buffer.

    int32 words   0 version | 1 flags | 2 slots | 3 entries | 4 geometry checksum
                  then per slot: count, had-a-gradient, selection notes (float32 bits)
    bytes         values, then indices, each section aligned for typed views

Every rank's payload of a step has the same length, known from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.select.base import Picks
from thinwire.select.rows import RowTable
from thinwire.wire.indices import IndexCode
from thinwire.wire.values import ValueCode

WIRE_VERSION = 0x74570001
NON_FINITE = 1
FIXED_WORDS = 5
SLOT_WORDS = 2
ALIGNMENT = 16


@dataclass(frozen=True)
class Header:
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
class Flags:
    """What a rank knows of its own gradient before it encodes."""

    non_finite: Tensor
    """bool []"""
    had_gradient: Tensor
    """bool [slots]"""


class Codec:
    """One payload format: value code x index code over a row table."""

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
        self.control_bytes = self.nbytes - values.nbytes(table) - indices.nbytes(table)
        self._full_counts = torch.tensor([r.entries for r in table.rows], dtype=torch.int32)

    def encode(self, picks: Picks, flags: Flags) -> tuple[Tensor, Tensor]:
        """(payload, the values as every rank will decode them)."""
        device = picks.values.device
        payload = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._write_header(payload, picks, flags)
        raw_values = self.values.encode(picks.values, self.table)
        payload[self.values_at : self.values_at + raw_values.numel()] = raw_values
        raw_indices = self.indices.encode(picks.indices, self.table)
        payload[self.indices_at : self.indices_at + raw_indices.numel()] = raw_indices
        return payload, self.values.decode(raw_values, self.table)

    def _write_header(self, payload: Tensor, picks: Picks, flags: Flags) -> None:
        words = payload[: 4 * self.header_words].view(torch.int32)
        words[0] = WIRE_VERSION
        words[1] = (flags.non_finite | ~picks.values.isfinite().all()).to(torch.int32) * NON_FINITE
        words[2] = len(self.table.rows)
        words[3] = self.table.entries
        words[4] = self.table.signature
        slots = words[FIXED_WORDS:].view(len(self.table.rows), SLOT_WORDS + self.note_words)
        slots[:, 0] = self._full_counts if picks.counts is None else picks.counts
        slots[:, 1] = flags.had_gradient
        if self.note_words:
            assert picks.notes is not None
            slots[:, SLOT_WORDS:] = picks.notes.float().view(torch.int32)

    def read_headers(self, payloads: Tensor) -> Header:
        """Headers of all ranks from the gathered payloads [world, nbytes]; refuses what this codec did not write."""
        if payloads.shape[-1] != self.nbytes:
            raise WireError(
                f"payload has {payloads.shape[-1]} bytes where {self.nbytes} were agreed on"
            )
        world = payloads.shape[0]
        words = payloads[:, : 4 * self.header_words].contiguous().view(torch.int32)
        slots = words[:, FIXED_WORDS:].view(
            world, len(self.table.rows), SLOT_WORDS + self.note_words
        )
        counts = slots[..., 0]
        non_finite = (words[:, 1] & NON_FINITE).bool()
        if words.device.type == "cpu":
            self._check_header(words, counts)
        else:
            # A host-side check would wait for the device; a corrupt header marks the step as bad instead.
            non_finite = non_finite | (words[:, 0] != WIRE_VERSION)
            non_finite = non_finite | (words[:, 4] != self.table.signature)
        return Header(
            non_finite=non_finite,
            counts=counts,
            had_gradient=slots[..., 1].bool(),
            notes=slots[..., SLOT_WORDS:].contiguous().view(torch.float32),
        )

    def _check_header(self, words: Tensor, counts: Tensor) -> None:
        expected = (
            WIRE_VERSION,
            None,
            len(self.table.rows),
            self.table.entries,
            self.table.signature,
        )
        meanings = ("version", "flags", "number of slots", "number of entries", "layout checksum")
        for word, (value, meaning) in enumerate(zip(expected, meanings, strict=True)):
            wrong = words[:, word] != value if value is not None else words[:, word] & ~NON_FINITE
            if bool(wrong.any()):
                rank = int(wrong.nonzero()[0])
                raise WireError(
                    f"payload of rank {rank} has {meaning} {int(words[rank, word])}, expected {value or 'known flags'}"
                )
        if bool(((counts < 0) | (counts > self._full_counts)).any()):
            raise WireError("a payload header counts more entries than its slot has places")

    def decode(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """(flat positions, values) of one rank's payload; an index outside its row is refused."""
        raw_values = payload[self.values_at : self.values_at + self.values.nbytes(self.table)]
        raw_indices = payload[self.indices_at : self.indices_at + self.indices.nbytes(self.table)]
        values = self.values.decode(raw_values, self.table)
        indices = self.indices.decode(raw_indices, self.table)
        outside = (indices < 0) | (indices >= self.table.row_lengths(indices.device))
        if payload.device.type == "cpu":
            if bool(outside.any()):
                raise WireError("a payload holds an index outside its row")
        else:
            # No host wait on an accelerator: a corrupt entry becomes a NaN at a legal place, which every
            # rank decodes alike and which marks the step as bad.
            values = torch.where(outside, torch.nan, values)
            indices = torch.where(outside, 0, indices)
        return self.table.positions(indices), values


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
