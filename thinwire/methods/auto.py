"""Auto: the method to start with. It measures, predicts, chooses, and compresses no more than the time needs."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress.base import Compressor
from thinwire.layout import Slot
from thinwire.methods.base import Adaptive, Dense, Method
from thinwire.validate import check_choice, check_positive_int, check_positive_number


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """Starts dense, measures real steps, predicts every candidate, tries the best and keeps the winner; then goes on watching.

    Of all candidates whose step takes at most 10 % longer than one without communication, but no more than 5 % longer than the
    fastest (and 2 % are always allowed), the one that compresses least wins; if that is dense, nothing is compressed. `handle.advise()` tells what was found, and why.
    What is safe depends on the optimizer: without `attach(..., optimizer=opt)` "safe" is dense only.
    """

    quality: str = "safe"
    """What Auto may risk: "safe" takes only what is level with dense in our own runs for this kind of optimizer, "balanced"
    also what is usual practice, "fastest" anything."""
    measure_s: float = 10.0
    """Seconds of steps that are measured at most, in no fewer than three steps."""
    measure_steps: int = 30
    """Steps that are measured at most."""
    trial_steps: int = 5
    """Timed steps of each of the best three."""
    window: int = 200
    """Every so many steps the time of a step is compared with what was expected; after three comparisons in a row that
    differ by more than 15 % it plans anew."""

    def __post_init__(self) -> None:
        check_choice("quality", self.quality, ("safe", "balanced", "fastest"))
        check_positive_number("measure_s", self.measure_s)
        for field in ("measure_steps", "trial_steps", "window"):
            check_positive_int(field, getattr(self, field))

    @property
    def suits_adam(self) -> bool:
        return True

    @property
    def adaptive(self) -> Adaptive | None:
        return Adaptive(
            quality=self.quality,
            measure_s=self.measure_s,
            measure_steps=self.measure_steps,
            trial_steps=self.trial_steps,
            window=self.window,
        )

    def at(self, step: int) -> Method:
        return Dense()

    def compressor(self) -> Compressor:
        return Dense().compressor()

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        return None

    def describe(self, slot: Slot) -> str:
        return "dense until it is measured"
