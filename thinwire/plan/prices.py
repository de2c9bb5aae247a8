"""Prices: how long a collective takes, on a link that was measured or on one that is only described.

An exchange is priced by the requests it yields, which know their bytes. There is no second list of formulas per exchange.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
ALL_TO_ALL = "all_to_all"
SWAP = "swap"
LIKE = {"all_to_all_uneven": ALL_TO_ALL, "broadcast": ALL_GATHER, SWAP: ALL_TO_ALL}
"""Kinds that are not measured by themselves, and the one whose price they pay."""


@dataclass(frozen=True)
class Travel:
    """One collective of an exchange."""

    kind: str
    """As `Request.kind`."""
    sent_bytes: float
    """What this rank puts on the wire."""


Rounds = tuple[tuple[Travel, ...], ...]
"""The collectives of one exchange: those of a round travel together, the next round needs their replies."""


def sent_bytes(rounds: Rounds) -> float:
    """What a rank puts on the wire in all of them."""
    return sum(travel.sent_bytes for batch in rounds for travel in batch)


class Prices(ABC):
    """Seconds of every kind of collective among one set of workers."""

    @abstractmethod
    def latency(self, kind: str) -> float:
        """Seconds that it takes with next to nothing in it."""

    @abstractmethod
    def seconds_per_byte(self, kind: str) -> float:
        """For every byte that a rank sends."""

    def seconds(self, rounds: Rounds) -> float:
        """Of a whole exchange: a round pays the largest latency of its requests and all of their bytes."""
        travels = [one for batch in rounds for one in batch]
        return self.latencies(rounds) + sum(
            one.sent_bytes * self.seconds_per_byte(one.kind) for one in travels
        )

    def latencies(self, rounds: Rounds) -> float:
        """What it would take with next to nothing in it."""
        return sum(max(self.latency(one.kind) for one in batch) for batch in rounds if batch)


@dataclass(frozen=True)
class Line:
    """latency + seconds per byte x bytes."""

    latency_s: float
    per_byte_s: float


@dataclass(frozen=True)
class MeasuredPrices(Prices):
    """A line per kind, fitted to collectives of several sizes on the real group."""

    lines: Mapping[str, Line]

    def latency(self, kind: str) -> float:
        return self.lines[LIKE.get(kind, kind)].latency_s

    def seconds_per_byte(self, kind: str) -> float:
        return self.lines[LIKE.get(kind, kind)].per_byte_s

    def times(self, factor: float) -> MeasuredPrices:
        """Everything so many times as dear."""
        return MeasuredPrices(
            {
                kind: Line(factor * line.latency_s, factor * line.per_byte_s)
                for kind, line in self.lines.items()
            }
        )


@dataclass(frozen=True)
class LinkPrices(Prices):
    """A link that nobody has measured: predicted from its rate, the latency of one hop and the number of workers.

    An all-reduce goes round a ring, or up and down a tree where that is faster at next to no bytes; a swap is one hop; the others
    go round.
    """

    bits_per_s: float
    hop_s: float
    workers: int

    def latency(self, kind: str) -> float:
        if kind == SWAP:
            return self.hop_s
        ring = (self.workers - 1) * self.hop_s
        if LIKE.get(kind, kind) == ALL_REDUCE:
            return min(2 * ring, 2 * math.ceil(math.log2(max(2, self.workers))) * self.hop_s)
        return ring

    def seconds_per_byte(self, kind: str) -> float:
        return 8 / self.bits_per_s


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds) with the least relative error; neither of its numbers is negative."""
    weights = [1 / max(seconds, 1e-9) ** 2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    shared = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = max(0.0, shared / spread) if spread else 0.0
    if mean_y < slope * mean_x:
        # Through the origin: less than no latency is noise.
        slope = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
            w * x * x for w, (x, _) in zip(weights, points, strict=True)
        )
        return Line(0.0, slope)
    return Line(mean_y - slope * mean_x, slope)
