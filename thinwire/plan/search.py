"""The exact search: which level (dense, int8, top-k 1 %, ...) each bucket gets.

Buckets are decided in order. What is decided so far is a label: delay by encoding, time at which the link is free, time for
decoding, what waits to travel together with later buckets, energy kept. The time of a step grows with each of these times, so
that a label that is no better than another in any respect can be dropped, where both have as many bytes waiting: those decide
when the link is used next. What is left at the end are all the best trade-offs, as if every combination had been tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.plan.step_model import Conditions, Cost

TIME_GRAIN = 1e-9
"""Seconds: sums in another order differ by less."""
MOST_LABELS = 128
"""Beyond so many, neighbours on the front are thinned out. Real models need a few dozen; the result is then near the best."""

DELAY, FREE, DECODED, LAST_DECODE, LATENCY, TRANSFER, KEPT, BYTES = range(8)
"""Rows of the labels. Latency, transfer and bytes are of what waits for later buckets."""


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


def find_fastest(conditions: Conditions, levels: Sequence[Sequence[Level]]) -> Found:
    """The choice with the shortest step; of several the one that keeps most."""
    timed = [[Level(level.cost, 0.0) for level in bucket] for bucket in levels]
    fastest = min(found.step_s for found in _trade_offs(conditions, timed, math.inf))
    in_time = _trade_offs(conditions, levels, fastest)
    # Thinned out, the front may have lost it.
    return _most_kept(in_time or _trade_offs(conditions, levels, math.inf))


def find_best(
    conditions: Conditions, levels: Sequence[Sequence[Level]], deadline_s: float
) -> Found:
    """The choice that keeps most among those whose step takes no longer than `deadline_s`; of several the fastest.

    If no choice is fast enough, the fastest.
    """
    in_time = _trade_offs(conditions, levels, deadline_s)
    return _most_kept(in_time) if in_time else find_fastest(conditions, levels)


def _most_kept(found: Sequence[Found]) -> Found:
    return min(found, key=lambda one: (-one.kept, one.step_s))


def _trade_offs(
    conditions: Conditions, levels: Sequence[Sequence[Level]], deadline_s: float
) -> list[Found]:
    """Every choice in time that no other one beats in all respects."""
    latest = deadline_s - conditions.rest_s + TIME_GRAIN
    charged = [[(conditions.charge(one.cost), one.kept) for one in bucket] for bucket in levels]
    enough = conditions.coalesce_bytes
    least = _least_to_come(conditions.ready_s, charged, alone=enough == 0)
    labels = torch.zeros(8, 1, dtype=torch.float64)
    origins: list[Tensor] = []
    """Per bucket: [2, labels], the label before and the level taken."""
    for ready, options, coming in zip(conditions.ready_s, charged, least, strict=True):
        is_last = len(origins) == len(charged) - 1
        grown = _extend(labels, ready, options, 0.0 if is_last else enough)
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


def _extend(
    labels: Tensor, ready: float, options: Sequence[tuple[Cost, float]], enough: float
) -> Tensor:
    """[8, options x labels]: every label with every option for the next bucket. What sends `enough` bytes leaves with it."""
    grown = []
    for cost, kept in options:
        new = labels.clone()
        new[DELAY] += cost.encode_s
        new[DECODED] += cost.decode_s
        new[LAST_DECODE] = cost.decode_s
        new[KEPT] += kept
        new[LATENCY] = labels[LATENCY].clamp(min=cost.latency_s)
        new[TRANSFER] += cost.exchange_s - cost.latency_s
        new[BYTES] += cost.sent_bytes
        leaves = new[BYTES] >= enough
        sent = torch.maximum(new[FREE], ready + new[DELAY])
        new[FREE] = torch.where(leaves, sent + new[LATENCY] + new[TRANSFER], new[FREE])
        new[[LATENCY, TRANSFER, BYTES]] *= ~leaves
        grown.append(new)
    return torch.cat(grown, dim=1)


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
    ready: Sequence[float], charged: Sequence[Sequence[tuple[Cost, float]]], *, alone: bool
) -> list[LeastToCome]:
    """For every bucket, what those behind it add at least; a latency only if each travels `alone`."""
    exchange = encode = decode = 0.0
    tail = -math.inf
    found: list[LeastToCome] = []
    for moment, options in zip(reversed(ready), reversed(charged), strict=True):
        found.insert(0, LeastToCome(exchange, tail, encode, decode, ready[-1]))
        least_encode = min(cost.encode_s for cost, _ in options)
        exchange += min(cost.exchange_s - (0 if alone else cost.latency_s) for cost, _ in options)
        tail = least_encode + max(tail, moment + exchange)
        encode += least_encode
        decode += min(cost.decode_s for cost, _ in options)
    return found


def _front(labels: Tensor, ends: Tensor, latest: float) -> Tensor:
    """Indices of the labels in time that no other one beats or equals in all respects; of equals the first."""
    candidates = (ends <= latest).nonzero()[:, 0]
    times, kept, waiting = (labels[rows, candidates] for rows in (slice(KEPT), KEPT, BYTES))
    no_worse = (times[:, :, None] <= times[:, None, :]).all(0) & (kept[:, None] >= kept[None, :])
    no_worse &= waiting[:, None] == waiting[None, :]
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
