"""The k-th largest magnitude of numbers that are spread over ranks, found by radix select.

|x| as an integer has the order of |x| as a number. Each round all-reduces one histogram of the next few bits of
those that are still in question; only integers travel, so every rank finds the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.requests import AllGather, AllReduce, Program

MAGNITUDE_BITS = 31
EXACT = (8, 8, 8, 7)
"""Bits per round that leave nothing open."""
MEDIUM = (7, 6)
"""A threshold good to 3 %: exponent and 5 bits of the mantissa."""
COARSE = (5, 4)
"""Exponent and 1 bit of the mantissa."""


def rounds_for(entries: int) -> tuple[int, ...]:
    """A histogram that is small beside the entries it serves."""
    if entries >= 1 << 14:
        return EXACT
    return MEDIUM if entries >= 1 << 11 else COARSE


def magnitude_bits(values: Tensor) -> Tensor:
    """int32 with the order of |values|."""
    return values.abs().float().view(torch.int32)


@dataclass(frozen=True, eq=False)
class Candidates:
    """This rank's share of the numbers: `spans` are the segments that compete among themselves."""

    bits: Tensor
    """int32 magnitude bits."""
    present: Tensor
    """bool: which of them take part."""
    spans: Sequence[tuple[int, int]]


def choose_largest(
    candidates: Candidates,
    keep: Sequence[Tensor],
    rounds: Sequence[tuple[int, ...]],
    *,
    world: int,
    rank: int,
    phase: str,
) -> Program[Tensor]:
    """bool mask of the winners: per segment exactly keep[s] over all ranks, or all if there are fewer.

    1. Per round: count the next bits of the candidates whose higher bits equal the prefix found so far, sum the counts
       over ranks, and descend into the bin that holds the k-th largest.
    2. Candidates above the final prefix win. Those equal to it are ties: every rank gets its share of the places that
       are left, in proportion to its ties, and fills it in index order. (Lower ranks first would leave a few owners with
       most of the winners wherever the histogram is coarse.)

    `keep[s]` are numbers on the device that all ranks share; `rounds[s]` may stop early, which makes the ties more.
    """
    segments = range(len(candidates.spans))
    searches = [Search(candidates, s, keep[s], rounds[s]) for s in segments]
    depth = max((len(r) for r in rounds), default=0)
    for level in range(depth):
        active = [search for search in searches if level < len(search.rounds)]
        counts = torch.cat([search.histogram(level) for search in active])
        if world > 1:
            (counts,) = yield (AllReduce(counts, f"{phase}/histogram", counts.nbytes),)
        pieces = counts.split([1 << search.rounds[level] for search in active])
        for search, piece in zip(active, pieces, strict=True):
            search.descend(piece, level)
    ties = torch.stack([search.ties().sum() for search in searches]).to(torch.int32)
    everywhere = ties[None]
    if world > 1:
        (everywhere,) = yield (AllGather(ties, f"{phase}/ties", ties.nbytes),)
    remaining = torch.stack([search.remaining for search in searches])
    shares = share_out(remaining, everywhere.long())[rank]
    mask = torch.zeros_like(candidates.present)
    for s, search in enumerate(searches):
        start, stop = candidates.spans[s]
        mask[start:stop] = search.winners(shares[s])
    return mask


def share_out(places: Tensor, ties: Tensor) -> Tensor:
    """Places [segments] for ties [world, segments], in proportion, whole numbers that add up; all if they suffice."""
    up_to = ties.cumsum(0)
    total = up_to[-1]
    granted = torch.minimum(places, total) * up_to // total.clamp(min=1)
    return granted.diff(dim=0, prepend=torch.zeros_like(granted[:1]))


class Search:
    """Radix select in one segment."""

    def __init__(
        self, candidates: Candidates, segment: int, keep: Tensor, rounds: tuple[int, ...]
    ) -> None:
        start, stop = candidates.spans[segment]
        self.bits = candidates.bits[start:stop]
        self.present = candidates.present[start:stop]
        self.rounds = rounds
        self.remaining = keep.to(torch.int64)
        """How many are still to be found at or below the prefix."""
        self.prefix = torch.zeros((), dtype=torch.int32, device=self.bits.device)

    def _shift(self, level: int) -> int:
        return MAGNITUDE_BITS - sum(self.rounds[: level + 1])

    def _top(self, levels: int) -> Tensor:
        """The bits that `levels` rounds have looked at."""
        return self.bits >> (MAGNITUDE_BITS - sum(self.rounds[:levels]))

    def histogram(self, level: int) -> Tensor:
        width = self.rounds[level]
        digits = (self.bits >> self._shift(level)) & ((1 << width) - 1)
        open_ = self.present
        if level:
            open_ = open_ & (self._top(level) == self.prefix)
        counts = torch.zeros(1 << width, dtype=torch.int32, device=self.bits.device)
        return counts.scatter_add_(0, digits.long(), open_.to(torch.int32))

    def descend(self, counts: Tensor, level: int) -> None:
        """Into the highest bin with at least `remaining` candidates at or above it; the lowest if there are fewer."""
        at_or_above = counts.long().flip(0).cumsum(0).flip(0)
        digit = ((at_or_above >= self.remaining).sum() - 1).clamp(min=0)
        # index_select, because `counts[digit]` would read the digit on the host.
        above = (at_or_above - counts).index_select(0, digit.view(1)).view(())
        self.remaining = self.remaining - above
        self.prefix = (self.prefix << self.rounds[level]) | digit.to(torch.int32)

    def ties(self) -> Tensor:
        return self.present & (self._top(len(self.rounds)) == self.prefix)

    def winners(self, tie_places: Tensor) -> Tensor:
        """Winners among this rank's candidates, `tie_places` of its ties among them."""
        above = self.present & (self._top(len(self.rounds)) > self.prefix)
        ties = self.ties()
        return above | (ties & (ties.cumsum(0) <= tie_places))
