"""The exact search: which level (dense, int8, top-k 1 %, ...) each bucket gets.

Buckets are decided in order. What is decided so far is a label: delay by encoding, time at which the link is free, time for
decoding, what waits to travel together with later buckets, energy kept. The time of a step grows with each of these times, so
that a label that is no better than another in any respect can be dropped, where both have as many bytes waiting: those decide
when the link is used next. What is left at the end are all the best trade-offs, as if every combination had been tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.plan.step_model import Conditions, Cost, join_costs

TIME_GRAIN = 1e-9
"""Seconds: sums in another order differ by less."""
MOST_LABELS = 128
"""Beyond so many, neighbours on the front are thinned out. Real models need a few dozen; the result is then near the best."""

DELAY, FREE, DECODED, LAST_DECODE, LATENCY, TRANSFER, KEPT, BYTES, KIND = range(9)
"""Rows of the labels. Latency, transfer and bytes are of what waits for later buckets; so is the kind of the last one, if the next one
is encoded with it."""
NO_KIND = -1.0


@dataclass(frozen=True)
class Level:
    """One way to send one bucket."""

    cost: Cost
    kept: float
    """Share of the gradient's squared sum that arrives at once, times the bucket's weight."""


@dataclass(frozen=True)
class Found:
    """The best choice of levels."""

    choice: tuple[int, ...]
    step_s: float
    kept: float


Levels = Sequence[Sequence[Level]]
"""By bucket, those that it can have; of all buckets alike."""


def find_fastest(conditions: Conditions, levels: Levels) -> Found:
    """The choice with the shortest step; of several the one that keeps most."""
    timed = [[Level(level.cost, 0.0) for level in bucket] for bucket in levels]
    fastest = min(_search(conditions, timed, math.inf), key=lambda found: found.step_s)
    # Thinned out, the front may have lost it.
    kept = sum(bucket[number].kept for bucket, number in zip(levels, fastest.choice, strict=True))
    in_time = _search(conditions, levels, fastest.step_s)
    return _most_kept([*in_time, replace(fastest, kept=kept)])


def find_best(conditions: Conditions, levels: Levels, deadline_s: float) -> Found:
    """The choice that keeps most among those whose step takes no longer than `deadline_s`; of several the fastest.

    If no choice is fast enough, the fastest.
    """
    in_time = _search(conditions, levels, deadline_s)
    return _most_kept(in_time) if in_time else find_fastest(conditions, levels)


def _search(conditions: Conditions, levels: Levels, deadline_s: float) -> list[Found]:
    """The best trade-offs in time. Where buckets are encoded as one, those in which these are alike are looked for apart, too:
    among all that there are then, thinning out may lose them."""
    found = _trade_offs(conditions, levels, deadline_s)
    if not any(conditions.with_next):
        return found
    units = conditions.units
    joined = [
        [
            Level(join_costs([one.cost for one in alike]), sum(one.kept for one in alike))
            for alike in zip(*(levels[index] for index in unit), strict=True)
        ]
        for unit in units
    ]
    return found + [
        replace(
            one,
            choice=tuple(
                number for unit, number in zip(units, one.choice, strict=True) for _ in unit
            ),
        )
        for one in _trade_offs(conditions.of_units(), joined, deadline_s)
    ]


def _most_kept(found: Sequence[Found]) -> Found:
    return min(found, key=lambda one: (-one.kept, one.step_s))


def _trade_offs(conditions: Conditions, levels: Levels, deadline_s: float) -> list[Found]:
    """Every choice in time that no other one beats in all respects."""
    latest = deadline_s - conditions.rest_s + TIME_GRAIN
    charged = [[(conditions.charge(one.cost), one.kept) for one in bucket] for bucket in levels]
    enough = conditions.coalesce_bytes
    least = _least_to_come(conditions, charged)
    labels = torch.zeros(9, 1, dtype=torch.float64)
    labels[KIND] = NO_KIND
    origins: list[Tensor] = []
    """Per bucket: [2, labels], the label before and the level taken."""
    for ready, options, coming in zip(conditions.ready_s, charged, least, strict=True):
        index = len(origins)
        grown = _extend(labels, options, enough)
        if not conditions.leaves_with_next(index):
            _send(grown, ready, 0.0 if index == len(charged) - 1 else enough)
            grown[KIND] = NO_KIND
        count = labels.shape[1]
        origin = torch.stack(
            [
                torch.arange(count).repeat(len(options)),
                torch.arange(len(options)).repeat_interleave(count),
            ]
        )
        front = _front(grown, coming.earliest_end(grown), latest)
        labels, origin = grown[:, front], origin[:, front]
        origins.append(origin)
    after_encode = conditions.ready_s[-1] + labels[DELAY] + labels[DECODED] - labels[LAST_DECODE]
    ends = torch.maximum(labels[FREE], after_encode) + labels[LAST_DECODE] + conditions.rest_s
    return [
        Found(_trace(origins, index), step_s, kept)
        for index, (step_s, kept) in enumerate(
            zip(ends.tolist(), labels[KEPT].tolist(), strict=True)
        )
        if step_s <= deadline_s + TIME_GRAIN
    ]


def _extend(labels: Tensor, options: Sequence[tuple[Cost, float]], enough: float) -> Tensor:
    """[9, options x labels]: every label with every option for the next bucket. Beyond `enough` bytes it does not matter how many wait."""
    grown = []
    for cost, kept in options:
        new = labels.clone()
        new[DELAY] += cost.encode_s + cost.start_s * (labels[KIND] != cost.kind)
        new[KIND] = cost.kind
        new[DECODED] += cost.decode_s
        new[LAST_DECODE] = cost.decode_s
        new[KEPT] += kept
        new[LATENCY] = labels[LATENCY].clamp(min=cost.latency_s)
        new[TRANSFER] += cost.exchange_s - cost.latency_s
        new[BYTES] = (labels[BYTES] + cost.sent_bytes).clamp(max=enough)
        grown.append(new)
    return torch.cat(grown, dim=1)


def _send(labels: Tensor, ready: float, enough: float) -> None:
    """What waits leaves, in place, where it sends `enough` bytes."""
    leaves = labels[BYTES] >= enough
    sent = torch.maximum(labels[FREE], ready + labels[DELAY])
    labels[FREE] = torch.where(leaves, sent + labels[LATENCY] + labels[TRANSFER], labels[FREE])
    labels[[LATENCY, TRANSFER, BYTES]] *= ~leaves


def _trace(origins: Sequence[Tensor], index: int) -> tuple[int, ...]:
    choice: list[int] = []
    for origin in reversed(origins):
        choice.append(int(origin[1, index]))
        index = int(origin[0, index])
    return tuple(reversed(choice))


@dataclass(frozen=True)
class LeastToCome:
    """What the buckets behind one add at least, if each took what is cheapest in every respect."""

    exchange: float
    tail: float
    """When the link's work ends, for a label without delay whose link is free at once."""
    encode: float
    decode: float
    last_ready: float

    def earliest_end(self, labels: Tensor) -> Tensor:
        """No choice for the buckets to come ends before this."""
        delay = labels[DELAY]
        decoded = self.last_ready + delay + self.encode + labels[DECODED] + self.decode
        waiting = labels[LATENCY] + labels[TRANSFER]
        on_link = torch.maximum(labels[FREE] + waiting + self.exchange, delay + self.tail)
        return torch.maximum(on_link, decoded)


def _least_to_come(
    conditions: Conditions, charged: Sequence[Sequence[tuple[Cost, float]]]
) -> list[LeastToCome]:
    """For every bucket, what those behind it add at least; a start and a latency only where each is by itself."""
    ready, encoded_alone = conditions.ready_s, not any(conditions.with_next)
    sent_alone = encoded_alone and conditions.coalesce_bytes == 0
    exchange = encode = decode = 0.0
    tail = -math.inf
    found: list[LeastToCome] = []
    for moment, options in zip(reversed(ready), reversed(charged), strict=True):
        found.insert(0, LeastToCome(exchange, tail, encode, decode, ready[-1]))
        least_encode = min(c.encode_s + encoded_alone * c.start_s for c, _ in options)
        exchange += min(c.exchange_s - (not sent_alone) * c.latency_s for c, _ in options)
        tail = least_encode + max(tail, moment + exchange)
        encode += least_encode
        decode += min(cost.decode_s for cost, _ in options)
    return found


def _front(labels: Tensor, ends: Tensor, latest: float) -> Tensor:
    """Indices of the labels in time that no other one beats or equals in all respects; of equals the first."""
    candidates = (ends <= latest).nonzero()[:, 0]
    times, kept = (labels[rows, candidates] for rows in (slice(KEPT), KEPT))
    no_worse = (times[:, :, None] <= times[:, None, :]).all(0) & (kept[:, None] >= kept[None, :])
    for same in labels[[BYTES, KIND]][:, candidates]:
        no_worse &= same[:, None] == same[None, :]
    order = torch.arange(len(candidates))
    beats = no_worse & (~no_worse.T | (order[:, None] < order[None, :]))
    front = candidates[~beats.any(0)]
    return front if len(front) <= MOST_LABELS else front[_thin_out(labels[:, front], ends[front])]


def _thin_out(labels: Tensor, ends: Tensor) -> Tensor:
    """About `MOST_LABELS` of the labels: those that are best for some price of a second, and some of every time between."""
    time, kept = (
        (values - values.min()) / (values.max() - values.min()).clamp(min=1e-30)
        for values in (ends, labels[KEPT])
    )
    prices = torch.logspace(-3, 3, MOST_LABELS // 2, dtype=torch.float64)
    best = (kept[None] - prices[:, None] * time[None]).argmax(1)
    order = labels[FREE].argsort()
    places = torch.linspace(0, len(order) - 1, MOST_LABELS // 2).round().long()
    least = torch.stack([labels[DELAY].argmin(), labels[FREE].argmin(), ends.argmin()])
    return torch.cat([best, order[places], least]).unique()
