"""AdamScale: another method's selection where Adam steps, with Adam's momentum before compression.

Adam divides by the size of recent gradients. Of a compressed gradient most entries are 0 and the rest come late and large, so
that plain Adam behind it divides by something else than the gradient's size, and the largest gradients are not what moves the
weights most. With a divisor that does not depend on what was sent the update is linear in the gradients again: whatever is held
back moves the weights later by as much as it would have at once. The divisor of 1-bit Adam is kept in the same way: Tang et al., "1-bit
Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from thinwire.compress.base import Compressor
from thinwire.described import Described
from thinwire.errors import UsageError
from thinwire.layout import Slot
from thinwire.memory.adam import AdamMomentum, AdamSettings
from thinwire.memory.refresh import Refresh
from thinwire.methods.base import ADAM_TAKEOVER, Method, refuse_choosing
from thinwire.validate import (
    check_choice,
    check_instance,
    check_positive_int,
    check_positive_number,
)

FROZEN = "frozen"
USUAL_ADAM = AdamSettings(beta1=0.9, beta2=0.999, eps=1e-8, learned=1000, since=0)
"""What is taken over, in a rehearsal."""


@dataclass(frozen=True, kw_only=True)
class Settled(Described):
    """When the dense start has done its work: the divisors of most tensors that are to be compressed hardly change any more.

    All ranks compare the same steps, and agree.
    """

    tolerance: float = 0.1
    """The mean size of a tensor's divisor has to stay within this share of what it was, for three tensors of four,"""
    steps: int = 50
    """from one window to the next, of so many steps each."""
    at_least: int = 100
    """Steps that are dense in any case."""
    at_most: int = 1000
    """Steps after which the dense start ends in any case, with a warning."""

    def __post_init__(self) -> None:
        check_positive_number("tolerance", self.tolerance)
        check_positive_int("steps", self.steps)
        check_positive_int("at_least", self.at_least)
        check_positive_int("at_most", self.at_most)
        if self.at_most < self.at_least:
            raise UsageError(
                f"at_most is {self.at_most!r}; it must be no less than at_least, {self.at_least}"
            )


@dataclass(frozen=True, kw_only=True)
class AdamScale(Method):
    """Compression in Adam's own scale: AdamW while dense, then `method` on c / divisor.

    Needs `attach(..., optimizer=opt)` with `torch.optim.Adam` or `AdamW`, whose own steps are taken in the dense start and for
    dense parameters. Afterwards u = beta1 u + (1 - beta1) g on every worker; c = residual + u; of c the method sends
    q, chosen by the magnitude of c / divisor; w -= lr mean(q) / divisor, where the divisor is Adam's sqrt(v) + eps.

    >>> opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> handle = tw.attach(ddp, tw.AdamScale(method=tw.TopK(density=0.01), start=1000), optimizer=opt)
    """

    method: Method
    """What is done to parameters that are compressed, such as tw.TopK(density=0.01); its memory is replaced."""
    start: int | Settled = field(default_factory=Settled)
    """Dense steps in the beginning, in which the divisor is learned, or a rule for when it is. 0 for an optimizer that has
    learned it already."""
    divisor: str | Refresh = FROZEN
    """"frozen" keeps it as the dense start left it; with tw.memory.Refresh(every=50) it goes on learning."""
    limit: float | None = None
    """The most that a worker sends of an element, in units of its divisor; the rest waits. Set one if the divisor is
    refreshed. If quantised sums have no more bits than what is sent, an owner's own part is cut with the sum only."""
    floor: float = 0.0
    """The least second moment of an element, as a share of the mean over its tensor; limits the steps of entries that had no
    gradient in the dense start, such as those of rare words."""
    storage: str = "fp32"
    """The format in which momentum and residual are stored: "fp32", "bf16" or "int8" in blocks."""

    def __post_init__(self) -> None:
        check_instance("method", self.method, Method, "a method such as tw.TopK(density=0.01)")
        refuse_choosing("method", self.method, "in a scale")
        if isinstance(self.start, bool) or not isinstance(self.start, int | Settled):
            raise UsageError(
                f"start is {self.start!r}; it must be a number of steps or a rule such as tw.Settled()"
            )
        if isinstance(self.start, int) and self.start < 0:
            raise UsageError(f"start is {self.start!r}; it must be a whole number of at least 0")
        if not isinstance(self.divisor, Refresh):
            check_choice("divisor", self.divisor, (FROZEN,))
        self.method.in_scale(self.memory())

    def memory(self, adam: AdamSettings | None = None) -> AdamMomentum:
        """With what was taken over from the optimizer."""
        refresh = self.divisor if isinstance(self.divisor, Refresh) else None
        return AdamMomentum(refresh, self.limit, self.floor, self.storage, adam)

    def scaled(self, adam: AdamSettings) -> Method:
        """The method in Adam's scale, with what was taken over."""
        return self.method.in_scale(self.memory(adam))

    @property
    def takes_over(self) -> str:
        return ADAM_TAKEOVER

    @property
    def rehearsal(self) -> Method:
        return self.scaled(USUAL_ADAM)

    @property
    def seldom(self) -> tuple[int, Method] | None:
        if not isinstance(self.divisor, Refresh):
            return None
        every = self.divisor.every
        # As many exchanges came before as make the next one a refresh.
        return every, self.scaled(replace(USUAL_ADAM, since=1 - every))

    @property
    def host_sync_free(self) -> bool:
        return self.method.host_sync_free

    @property
    def host_sizes(self) -> frozenset[int]:
        return self.method.host_sizes

    def changed(self, change: Callable[[Method], Method]) -> Method:
        return replace(self, method=self.method.changed(change))

    def compressor(self) -> Compressor:
        raise UsageError(
            "method is AdamScale, which works only for a whole model, with attach(..., optimizer=opt)"
        )

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        return self.method.reason_against(slot, dense_bits, world)

    def describe(self, slot: Slot) -> str:
        return f"{self.method.describe(slot)}, in Adam's scale"
