"""Timeline: methods that follow one another at given steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from thinwire.compress.base import Compressor
from thinwire.errors import UsageError
from thinwire.layout import Slot
from thinwire.memory.base import Memory
from thinwire.methods.base import ADAM_TAKEOVER, Method, refuse_choosing
from thinwire.validate import check_instance

PAIRS = "pairs of a step and a method"


@dataclass(frozen=True, kw_only=True)
class Timeline(Method):
    """`phases` are (first step, method); the step counts synchronising backwards from 0, the same on all ranks.

    >>> tw.Timeline(phases=((0, tw.Dense()), (1000, tw.TopK(density=0.01))))
    """

    phases: tuple[tuple[int, Method], ...]

    def __post_init__(self) -> None:
        starts = phase_starts(self.phases)
        if starts[:1] != [0] or any(later <= earlier for earlier, later in pairwise(starts)):
            raise UsageError(f"phases start at {starts}; they must begin at 0 and increase")
        for _, method in self.phases:
            check_instance("phases", method, Method, PAIRS)
            refuse_choosing("phases", method, "a phase")
            if method.takes_over == ADAM_TAKEOVER:
                raise UsageError(
                    f"phases has {type(method).__name__}, which begins dense by itself; use it alone, with start= for the "
                    "number of dense steps"
                )

    def at(self, step: int) -> Method:
        index = bisect_right([start for start, _ in self.phases], step) - 1
        start, method = self.phases[index]
        return method.at(step - start)

    @property
    def turns(self) -> tuple[int, ...]:
        """Those of its methods among them."""
        ends = [*(start for start, _ in self.phases[1:]), None]
        return tuple(
            start + turn
            for (start, method), end in zip(self.phases, ends, strict=True)
            for turn in sorted({0, *method.turns})
            if end is None or start + turn < end
        )

    @property
    def suits_adam(self) -> bool:
        return all(method.suits_adam for _, method in self.phases)

    @property
    def host_sync_free(self) -> bool:
        return all(method.host_sync_free for _, method in self.phases)

    @property
    def host_sizes(self) -> frozenset[int]:
        return frozenset().union(*(method.host_sizes for _, method in self.phases))

    @property
    def owns_momentum(self) -> bool:
        return any(method.owns_momentum for _, method in self.phases)

    def with_momentum(self, momentum: float, nesterov: bool) -> Method:
        bound = [(start, method.with_momentum(momentum, nesterov)) for start, method in self.phases]
        owner = next((method for _, method in bound if method.owns_momentum), self)
        return replace(self, phases=tuple((start, method.beside(owner)) for start, method in bound))

    def in_scale(self, memory: Memory) -> Method:
        return replace(
            self, phases=tuple((start, method.in_scale(memory)) for start, method in self.phases)
        )

    def changed(self, change: Callable[[Method], Method]) -> Method:
        """In all phases but the dense ones, which have no settings that a rule could change."""
        phases = tuple(
            (start, method if method.is_dense else method.changed(change))
            for start, method in self.phases
        )
        return replace(self, phases=phases)

    def compressor(self) -> Compressor:
        return self.at(0).compressor()

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        return self.at(0).reason_against(slot, dense_bits, world)

    def describe(self, slot: Slot) -> str:
        return self.at(0).describe(slot)


def phase_starts(phases: Any) -> list[int]:
    """The first step of each phase; what are no pairs is refused."""
    pairs = isinstance(phases, Sequence) and all(
        isinstance(phase, Sequence) and len(phase) == 2 and type(phase[0]) is int
        for phase in phases
    )
    if not pairs:
        raise UsageError(f"phases is {phases!r}; it must be {PAIRS}")
    return [start for start, _ in phases]
