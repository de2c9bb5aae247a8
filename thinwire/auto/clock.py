"""StepClock: when the buckets of real training steps are ready and delivered, without a wait in any step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.layout import BucketLayout
from thinwire.observe.clock import Mark

Names = tuple[str, ...]
"""The parameters of a bucket."""
Parts = tuple[Names, ...]
"""Buckets that are encoded as one."""


def parts_of(layout: BucketLayout) -> Parts:
    """The buckets that a layout is made of."""
    parts: list[list[str]] = [[] for _ in layout.buffers]
    for slot in layout.slots:
        own = (
            part
            for part, (begin, count) in zip(parts, layout.buffers, strict=True)
            if begin <= slot.offset <= begin + count - slot.numel
        )
        next(own).append(slot.name)
    return tuple(tuple(part) for part in parts if part)


@dataclass
class StepMarks:
    """One step."""

    began: Mark
    ready: dict[Parts, Mark] = field(default_factory=dict)
    """By what is encoded together, in the order in which it came."""
    delivered: dict[Parts, Mark] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredSteps:
    """What several steps have in common, in seconds from the moment at which the first unit is ready."""

    units: tuple[Parts, ...]
    ready_s: tuple[float, ...]
    rest_s: float
    period_s: float


class StepClock:
    """Marks steps while it is installed on a reducer."""

    MOST_STEPS = 64

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[StepMarks] = []
        self._parts: WeakKeyDictionary[BucketLayout, Parts] = WeakKeyDictionary()

    def begin_step(self) -> None:
        self._steps.append(StepMarks(Mark(self._device)))
        del self._steps[: -self.MOST_STEPS]

    def ready(self, layout: BucketLayout, at: Mark) -> Callable[[], None]:
        """A unit's gradient was there at this mark. What is returned is to be called when its update is."""
        parts = self._parts.get(layout)
        if parts is None:
            parts = self._parts[layout] = parts_of(layout)
        step = self._steps[-1]
        step.ready[parts] = at

        def delivered() -> None:
            step.delivered[parts] = Mark(self._device)

        return delivered

    def clear(self) -> None:
        self._steps.clear()

    def periods(self) -> list[float]:
        """Seconds from the beginning of each step to that of the next; waits for the device to get there."""
        marks = [step.began for step in self._steps]
        pairs = itertools.pairwise(marks)
        return [after.ms_since(before) / 1e3 for before, after in pairs]

    def last_buckets(self) -> Parts:
        """Of the last step that has ended, in the order in which they came."""
        return tuple(itertools.chain.from_iterable(self._steps[-2].ready))

    def silent_s(self) -> float:
        """The last step that has ended, without the time in which it waited for nothing but the exchange."""
        step, following = self._steps[-2:]
        waits = (
            done.ms_since(ready)
            for done in step.delivered.values()
            for ready in list(step.ready.values())[-1:]
        )
        # Nothing is delivered in a step whose backward has failed.
        exposed = max(waits, default=0.0)
        return (following.began.ms_since(step.began) - max(0.0, exposed)) / 1e3

    def measured(
        self, typical: Callable[[Sequence[float]], float] = median
    ) -> MeasuredSteps | None:
        """All steps that have ended and had the units of the last one; None if most of them had others. `typical` makes one time of many."""
        ended = self._steps[:-1]
        if not ended:
            return None
        units = tuple(ended[-1].ready)
        rows = []
        for step, following in zip(ended, self._steps[1:], strict=True):
            if tuple(step.ready) != units or set(step.delivered) != set(units):
                continue
            first = next(iter(step.ready.values()))
            ready = [mark.ms_since(first) / 1e3 for mark in step.ready.values()]
            delivered = max(mark.ms_since(first) / 1e3 for mark in step.delivered.values())
            period = following.began.ms_since(step.began) / 1e3
            busy = max(delivered, ready[-1])
            rows.append((ready, max(0.0, period - busy), period))
        if 2 * len(rows) < len(ended):
            return None
        columns = zip(*(ready for ready, _, _ in rows), strict=True)
        return MeasuredSteps(
            units,
            tuple(typical(column) for column in columns),
            typical([rest for _, rest, _ in rows]),
            typical([period for _, _, period in rows]),
        )


BINS = 96
LEAST_EXPONENT = -64
"""Magnitudes below this power of two count as zeros; those above the last bin, 2 to the 32nd, as being in it."""
SAMPLE = 1 << 17
"""Elements that the curves of a bucket's parameters are made of, about."""


class EnergyMeter:
    """Histograms of magnitudes: how much of a squared sum the largest entries have. One pass, no wait."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def look(self, layout: BucketLayout, flat: Tensor) -> None:
        """Elements and squared sum of every parameter per power of two of the magnitude, of a sample."""
        stride = max(1, flat.numel() // SAMPLE)
        for slot in layout.slots:
            values = slot.span(flat)[::stride].float().nan_to_num(0.0, 0.0, 0.0)
            exponents = torch.frexp(values).exponent - LEAST_EXPONENT
            # A zero's exponent is 0, as that of numbers near 1.
            exponents = torch.where(values == 0, 0, exponents).clamp(0, BINS).long()
            counts = torch.zeros(BINS + 1, dtype=torch.float64, device=flat.device)
            counts.index_add_(0, exponents, torch.ones_like(values, dtype=torch.float64))
            squares = torch.zeros_like(counts).index_add_(0, exponents, values.double().square())
            self._seen[slot.name] = (counts, squares)

    def curve(self, names: Names) -> tuple[tuple[float, float], ...]:
        """(fraction of the entries, share of the squared sum), largest magnitudes first; empty if nothing was seen."""
        seen = [self._seen[name] for name in names if name in self._seen]
        if not seen:
            return ()
        counts, squares = (
            torch.stack(one).sum(0).flip(0).cumsum(0) for one in zip(*seen, strict=True)
        )
        total, energy = float(counts[-1]), float(squares[-1])
        if not energy > 0:
            return ()
        points = zip((counts / total).tolist(), (squares / energy).tolist(), strict=True)
        return tuple(dict(points).items())
