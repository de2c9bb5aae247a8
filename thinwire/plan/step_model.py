"""The model of a training step: buckets become ready, are encoded, take turns on one link, and are decoded.

    R_i = b_i + sum_{j<=i} e_j
    F_i = max(F_{i-1}, R_i) + c_i               one link, buckets in order
    T   = max(F_n, R_n + sum_{j<n} d_j) + d_n + rest

Where the thread that communicates also decodes (gloo), c_i becomes c_i + d_i and the sums of d vanish.

Buckets that are encoded as one, as the reducer's `merge_bytes` says, are ready at the same moment and leave together; neighbours
among them that are encoded alike share what the host does for each. Others leave together, too, if they send little: they wait until
they send `coalesce_bytes`, leave when the last of them is encoded, and pay one latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Cost:
    """What one bucket takes under one method, in seconds."""

    encode_s: float
    exchange_s: float
    decode_s: float
    latency_s: float = 0.0
    """The part of the exchange that buckets which travel together pay once."""
    sent_bytes: float = 0.0
    start_s: float = 0.0
    """What encoding takes beside, once for neighbours of one kind that are encoded as one."""
    kind: int = 0
    """Which method it is."""


@dataclass(frozen=True)
class Conditions:
    """What is the same whatever is chosen."""

    ready_s: tuple[float, ...]
    """b_i: when each bucket's gradient is there, from the moment at which the first one is."""
    rest_s: float
    """From the end of the last bucket's exchange to the first bucket of the next step: optimizer, forward, first layers."""
    decode_on_link: bool = False
    """Whether the thread that communicates decodes as well."""
    coalesce_bytes: float = 0.0
    """Buckets wait for each other until together they send so much, or until the last one is there."""
    with_next: tuple[bool, ...] = ()
    """Whether each bucket is encoded with the next one, and leaves with it; empty if none is."""

    def leaves_with_next(self, index: int) -> bool:
        return bool(self.with_next) and self.with_next[index]

    @property
    def units(self) -> list[range]:
        """Which buckets are encoded as one."""
        ends = [i + 1 for i in range(len(self.ready_s)) if not self.leaves_with_next(i)]
        return [range(first, end) for first, end in pairwise([0, *ends])]

    def of_units(self) -> Conditions:
        """The same where nobody looks into what is encoded as one."""
        ready = tuple(self.ready_s[unit[-1]] for unit in self.units)
        return replace(self, ready_s=ready, with_next=())

    @property
    def silent_s(self) -> float:
        """The step without communication."""
        return self.ready_s[-1] + self.rest_s

    def charge(self, cost: Cost) -> Cost:
        """What a bucket really adds to encoding, link and decoding here."""
        if not self.decode_on_link:
            return cost
        return replace(cost, exchange_s=cost.exchange_s + cost.decode_s, decode_s=0.0)


@dataclass(frozen=True)
class BucketSpan:
    """When one bucket does what, in seconds from the moment at which the first bucket is ready."""

    ready: float
    encoded: float
    sent: float
    """When its exchange begins."""
    arrived: float
    """When its exchange ends."""


@dataclass(frozen=True)
class StepPrediction:
    """A step as the model sees it."""

    step_s: float
    silent_s: float
    spans: tuple[BucketSpan, ...]

    @property
    def exposed_s(self) -> float:
        """What communication and compression add to a step without them."""
        return self.step_s - self.silent_s


def predict_step(conditions: Conditions, costs: Sequence[Cost]) -> StepPrediction:
    """A step in which every bucket has one of these costs."""
    spans: list[BucketSpan] = []
    waiting: list[tuple[float, float, Cost]] = []
    delay = free = decoding = last_decode = 0.0
    kind: int | None = None
    for ready, cost in zip(conditions.ready_s, map(conditions.charge, costs), strict=True):
        delay += cost.encode_s + (cost.start_s if cost.kind != kind else 0.0)
        decoding, last_decode = decoding + last_decode, cost.decode_s
        waiting.append((ready, ready + delay, cost))
        index = len(spans) + len(waiting) - 1
        if conditions.leaves_with_next(index):
            kind = cost.kind
            continue
        kind = None
        is_last = index == len(costs) - 1
        if is_last or sum(one.sent_bytes for *_, one in waiting) >= conditions.coalesce_bytes:
            sent = max(free, ready + delay)
            free = sent + exchange_together([one for *_, one in waiting])
            spans += [BucketSpan(came, encoded, sent, free) for came, encoded, _ in waiting]
            waiting = []
    ended = max(free, spans[-1].encoded + decoding) + last_decode
    return StepPrediction(ended + conditions.rest_s, conditions.silent_s, tuple(spans))


def join_costs(costs: Sequence[Cost]) -> Cost:
    """Of buckets that are encoded as one and alike."""
    return replace(
        costs[0],
        encode_s=sum(cost.encode_s for cost in costs),
        exchange_s=exchange_together(costs),
        decode_s=sum(cost.decode_s for cost in costs),
        latency_s=max(cost.latency_s for cost in costs),
        sent_bytes=sum(cost.sent_bytes for cost in costs),
    )


def exchange_together(costs: Sequence[Cost]) -> float:
    """Seconds of buckets that travel as one: all that they send, and the largest of their latencies."""
    latencies = [cost.latency_s for cost in costs]
    return sum(cost.exchange_s for cost in costs) - sum(latencies) + max(latencies)


NOTICEABLE = 0.02
"""Of a step: what is measured and what is predicted may differ by so much."""
MOST_DEARER = 4.0
SEARCH_STEPS = 12


def find_dearness(conditions: Conditions, costs: Sequence[Cost], measured_s: float) -> float:
    """How many times as dear as priced the exchanges of a step are that was measured; a quarter to four times.

    Links were priced by themselves. In a step they share processors and memory with the rest of it.
    """

    def predict(factor: float) -> float:
        dearer = [
            replace(c, exchange_s=factor * c.exchange_s, latency_s=factor * c.latency_s)
            for c in costs
        ]
        return predict_step(conditions, dearer).step_s

    if abs(predict(1.0) - measured_s) <= NOTICEABLE * measured_s:
        return 1.0
    low, high = 1 / MOST_DEARER, MOST_DEARER
    for _ in range(SEARCH_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predict(middle) < measured_s else (low, middle)
    return math.sqrt(low * high)


SPREAD_BUCKETS = 10
BACKWARD_SHARE = 2 / 3


def predict_from_bytes(
    step_s: float, sent_bytes: float, latency_s: float, seconds_per_byte: float
) -> float:
    """Seconds of a step of which only its own time and its bytes are known: a rough guess.

    The bytes leave in ten equal buckets, ready one after the other in the last two thirds of the step.
    """
    if not sent_bytes:
        return step_s
    ready = [
        step_s * BACKWARD_SHARE * (index + 1) / SPREAD_BUCKETS for index in range(SPREAD_BUCKETS)
    ]
    conditions = Conditions(tuple(ready), step_s - ready[-1])
    each = latency_s + sent_bytes * seconds_per_byte / SPREAD_BUCKETS
    return predict_step(conditions, [Cost(0.0, each, 0.0)] * SPREAD_BUCKETS).step_s
