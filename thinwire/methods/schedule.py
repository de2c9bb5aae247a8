"""Schedules: a density that changes with the step, and methods that follow one another.

Both are functions of the handle's step, which is the same on all ranks and part of its state, so that a resumed run
continues where it was. The handle asks at the beginning of every step and switches by itself; what is held back
carries over to the next density, is sent once where a slot turns dense, and starts empty where it turns sparse.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from thinwire.described import Described
from thinwire.errors import UsageError
from thinwire.validate import check_density, check_positive_int

# Every new density makes new tables, so a smooth ramp moves in steps of this relative size.
RAMP_STEP = 1.05


@dataclass(frozen=True)
class Schedule(Described):
    """`densities[i]` holds from `starts[i]` on. 1.0 means dense: no selection, no memory."""

    starts: tuple[int, ...]
    densities: tuple[float, ...]

    def __post_init__(self) -> None:
        for density in self.densities:
            check_density("density", density)
        if len(self.starts) != len(self.densities) or self.starts[:1] != (0,):
            raise UsageError(
                f"starts is {list(self.starts)}; it must begin with 0 and have one step per density"
            )
        if any(later <= earlier for earlier, later in pairwise(self.starts)):
            raise UsageError(f"starts is {list(self.starts)}; steps must increase")

    def at(self, step: int) -> float:
        """The density in force in the `step`-th synchronising backward, counted from 0."""
        return self.densities[bisect_right(self.starts, step) - 1]

    @property
    def final(self) -> float:
        return self.densities[-1]


def warmup(densities: Sequence[float], *, final: float, every: int) -> Schedule:
    """A list of densities, each for `every` steps (an epoch, say), then `final`. 1.0 is a dense warm-up.

    >>> tw.DGC(density=tw.warmup([0.25, 0.0625, 0.015625, 0.004], final=0.001, every=steps_per_epoch))
    """
    check_positive_int("every", every)
    if isinstance(densities, str) or not isinstance(densities, Sequence) or not densities:
        raise UsageError(f"densities is {densities!r}; it must be a list of densities")
    listed = (*map(_density, densities), _density(final))
    return Schedule(tuple(every * i for i in range(len(listed))), listed)


def exponential_warmup(
    *, final: float, start: float = 0.25, steps: int, every: int = 1, dense: int = 0
) -> Schedule:
    """From `start` to `final` by a constant factor, over `steps` steps after `dense` dense ones.

    `every=1` changes from step to step (in moves of at least 5 %), `every=steps_per_epoch` once per epoch.
    """
    check_positive_int("steps", steps)
    check_positive_int("every", every)
    start, final = _density(start), _density(final)
    if start < final:
        raise UsageError(f"start is {start!r}; it must not be below final, which is {final!r}")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise UsageError(f"dense is {dense!r}; it must be a whole number of at least 0")
    starts, densities = ([0], [1.0]) if dense else ([], [])
    for step in range(0, steps, every):
        density = start * (final / start) ** (step / steps)
        if step == 0 or densities[-1] >= density * RAMP_STEP:
            starts.append(dense + step)
            densities.append(density)
    if densities[-1] != final:
        starts.append(dense + steps)
        densities.append(final)
    return Schedule(tuple(starts), tuple(densities))


def decay(start: float, *, factor: float = 0.9, floor: float, every: int) -> Schedule:
    """`start`, times `factor` every `every` steps (an epoch, say), down to `floor`: late gradients need fewer entries.

    >>> tw.ADTopK(density=tw.decay(0.02, factor=0.9, floor=0.005, every=steps_per_epoch))
    """
    check_positive_int("every", every)
    start, floor = _density(start), _density(floor)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0.0 < factor < 1.0:
        raise UsageError(f"factor is {factor!r}; it must be a number between 0 and 1")
    if floor > start:
        raise UsageError(f"floor is {floor!r}; it must not be above start, which is {start!r}")
    densities = [start]
    while densities[-1] > floor:
        densities.append(max(floor, densities[-1] * factor))
    return Schedule(tuple(every * i for i in range(len(densities))), tuple(densities))


def _density(value: Any) -> float:
    check_density("density", value)
    return float(value)
