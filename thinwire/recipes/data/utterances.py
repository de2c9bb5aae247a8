"""Utterances: sequences of frames with their transcripts, each of its own length, padded batch by batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.recipes.examples import Batch, Examples


@dataclass(frozen=True, kw_only=True)
class Utterances(Examples):
    """All frames [sum of lengths, F] and all letters [sum of letter counts], one utterance after the other.

    The lengths stay on the CPU: how far to pad is decided there.
    """

    frames: Tensor
    lengths: Tensor
    letters: Tensor
    letter_counts: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        return (
            pad(self.frames, self._first_frames[index], self.lengths[index]),
            self.lengths[index],
            pad(self.letters, self._first_letters[index], self.letter_counts[index]).long(),
            self.letter_counts[index],
        )

    def to(self, device: torch.device) -> Utterances:
        return replace(self, frames=self.frames.to(device), letters=self.letters.to(device))

    @cached_property
    def _first_frames(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def _first_letters(self) -> Tensor:
        return self.letter_counts.cumsum(0) - self.letter_counts


def pad(rows: Tensor, first: Tensor, counts: Tensor) -> Tensor:
    """From each `first`, so many rows, and zeros up to the longest."""
    steps = torch.arange(int(counts.max()))
    inside = steps < counts[:, None]
    # Places beyond an end are read at its beginning and blanked.
    places = torch.where(inside, first[:, None] + steps, first[:, None]).to(rows.device)
    taken = rows[places.clamp(max=len(rows) - 1)]
    blank = ~inside.to(rows.device)
    return taken.masked_fill(blank.view(*blank.shape, *[1] * (taken.dim() - 2)), 0)
