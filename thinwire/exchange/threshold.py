"""The k-th largest magnitude of numbers that are spread over ranks, found by radix select in many segments at once, for
one rank or a team of ranks that is here.

|x| as an integer has the order of |x| as a number. Each round all-reduces one histogram of the next few bits of
those that are still in question; only integers travel, so every rank finds the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.lockstep import TeamProgram
from thinwire.exchange.requests import AllGather, AllReduce
from thinwire.exchange.segments import Segments

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
    """The share of the numbers of the ranks that are here: those of a segment compete among themselves."""

    bits: Tensor
    """int32 [ranks, elements]: magnitude bits."""
    present: Tensor
    """bool: which of them take part."""
    segments: Segments


class Round:
    """The bits that every segment looks at in one round. One that is done looks at none, and its digit is 0."""

    def __init__(
        self, rounds: Sequence[tuple[int, ...]], level: int, device: torch.device | None
    ) -> None:
        widths = [r[level] if level < len(r) else 0 for r in rounds]
        shifts = [MAGNITUDE_BITS - sum(r[: level + 1]) for r in rounds]
        self.columns = 1 << max(widths)
        bins = [which * self.columns + torch.arange(1 << w) for which, w in enumerate(widths) if w]
        self._bins = torch.cat(bins).to(device)
        self._full = self._bins.numel() == len(rounds) * self.columns
        self.shifts = torch.tensor(shifts, dtype=torch.int32, device=device)
        self.masks = torch.tensor([(1 << w) - 1 for w in widths], dtype=torch.int32, device=device)
        self._shift = shifts[0] if len({*zip(shifts, widths, strict=True)}) == 1 else None

    def digits(self, bits: Tensor, segments: Segments) -> Tensor:
        """The bits of this round, as numbers."""
        if self._shift is not None:
            return (bits >> self._shift) & (self.columns - 1)
        return (bits >> segments.spread(self.shifts)) & segments.spread(self.masks)

    def pack(self, grid: Tensor) -> Tensor:
        """What has to travel of [ranks, segments x columns]: the bins that there are."""
        return grid if self._full else grid.index_select(1, self._bins)

    def unpack(self, counts: Tensor) -> Tensor:
        """[segments, columns] out of what `pack` made."""
        if not self._full:
            grid = counts.new_zeros(self.shifts.numel() * self.columns)
            counts = grid.index_copy_(0, self._bins, counts)
        return counts.view(-1, self.columns)


class Rounds:
    """How the segments are searched: bits per round and segment. A segment may stop early, which makes its ties more."""

    def __init__(
        self, rounds: Sequence[tuple[int, ...]], device: torch.device | None = None
    ) -> None:
        depth = max((len(r) for r in rounds), default=0)
        self.levels = [Round(rounds, level, device) for level in range(depth)]
        left = [(1 << MAGNITUDE_BITS - sum(r)) - 1 for r in rounds]
        self.left = torch.tensor(left, dtype=torch.int32, device=device)
        """Per segment: the bits that no round looks at."""


def choose_largest(
    candidates: Candidates, keep: Tensor, rounds: Rounds, *, rank: int, phase: str
) -> TeamProgram[Tensor]:
    """bool mask of the winners: per segment exactly keep[s] over all ranks, or all if there are fewer.

    1. Per round: count the next bits of the candidates whose higher bits equal the prefix found so far, sum the counts
       over ranks, and descend into the bin that holds the k-th largest.
    2. Candidates above the final prefix win. Those equal to it are ties: every rank gets its share of the places that
       are left, in proportion to its ties, and fills it in index order. (Lower ranks first would leave a few owners with
       most of the winners wherever the histogram is coarse.)

    `keep` are numbers on the device that all ranks share, one per segment; `rank` is the first one that is here.
    """
    search = Search(candidates, keep)
    for level in rounds.levels:
        counts = search.histogram(level)
        replies = yield [(AllReduce(row, f"{phase}/histogram", row.nbytes),) for row in counts]
        search.descend(replies[0][0], level)
    turns, totals = candidates.segments.turns(search.open)
    ties = totals.to(torch.int32)
    replies = yield [(AllGather(row, f"{phase}/ties", row.nbytes),) for row in ties]
    shares = share_out(search.remaining, replies[0][0].long())[rank : rank + len(ties)]
    tied = search.open & (turns <= candidates.segments.spread(shares))
    return search.above(rounds.left) | tied


def share_out(places: Tensor, ties: Tensor) -> Tensor:
    """Places [segments] for ties [world, segments], in proportion, whole numbers that add up; all if they suffice."""
    up_to = ties.cumsum(0)
    total = up_to[-1]
    granted = torch.minimum(places, total) * up_to // total.clamp(min=1)
    return granted.diff(dim=0, prepend=torch.zeros_like(granted[:1]))


class Search:
    """Radix select in all segments at once."""

    def __init__(self, candidates: Candidates, keep: Tensor) -> None:
        self.candidates = candidates
        self.segments = candidates.segments
        self.open = candidates.present
        """bool: candidates that begin with their segment's prefix."""
        self.remaining = keep.to(torch.int64)
        """[segments]: how many are still to be found at or below the prefix."""
        self.prefix = torch.zeros_like(self.remaining, dtype=torch.int32)
        """[segments]: the bits found so far, where they belong in the number."""
        self._digits = candidates.bits

    def histogram(self, level: Round) -> Tensor:
        """int32 [ranks, bins]"""
        self._digits = level.digits(self.candidates.bits, self.segments)
        at = self.segments.cells(self._digits, level.columns)
        shape = (len(at), self.segments.count * level.columns)
        grid = torch.zeros(shape, dtype=torch.int32, device=at.device)
        return level.pack(grid.scatter_add_(1, at, self.open.to(torch.int32)))

    def descend(self, counts: Tensor, level: Round) -> None:
        """Into the highest bin with at least `remaining` candidates at or above it; the lowest if there are fewer."""
        grid = level.unpack(counts)
        up_to = grid.cumsum(1)
        above = up_to[:, -1:] - up_to
        # As many bins as have enough candidates above them. Where nothing is to be found all have, those beyond the
        # segment's own among them.
        enough = (above >= self.remaining[:, None]).sum(1, dtype=torch.int32)
        digit = torch.minimum(enough, level.masks)
        self.remaining = self.remaining - above.gather(1, digit.long()[:, None]).view(-1)
        self.prefix = self.prefix | (digit << level.shifts)
        self.open = self.open & (self._digits == self.segments.spread(digit))

    def above(self, left: Tensor) -> Tensor:
        """Candidates that win whatever the ties; `left` are the bits that no round has looked at."""
        return self.candidates.present & (
            self.candidates.bits > self.segments.spread(self.prefix | left)
        )
