"""Prospect: what an optimizer that was handed over allows, now and later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.errors import UsageError
from thinwire.methods.adam_scale import AdamScale, Settled
from thinwire.methods.base import ADAM_TAKEOVER, MOMENTUM_TAKEOVER, Adaptive, Dense, Method
from thinwire.methods.dgc import DGC
from thinwire.methods.topk import TopK
from thinwire.optim.adam import count_steps
from thinwire.optim.base import Takeover
from thinwire.optim.known import evidence_of
from thinwire.optim.momentum import TAKEN
from thinwire.optim.takeover import take_over
from thinwire.optim.velocity import VelocityOptimizer
from thinwire.plan.candidates import ADAM, DENSE, TAKEN_FROM, Candidate, find_candidates

LEARNED_STEPS = Settled().at_most
"""After so many steps every dense start is over."""
OWNERS: dict[str, Method] = {
    MOMENTUM_TAKEOVER: DGC(dense_fallback=False),
    ADAM_TAKEOVER: AdamScale(method=TopK(dense_fallback=False), start=1),
}
"""A method that takes over what can be taken over, by its name in `thinwire.optim`, and has a place for all of it."""


@dataclass(frozen=True)
class Prospect:
    """The optimizer and the parameters that it steps, if the user handed it over."""

    optimizer: Optimizer | None = None
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """What methods cannot take over here, of what a method says it `takes_over`, and why."""
    _momenta: list[Any] = field(init=False)
    """The optimizer's when it was handed over."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_momenta", momenta_of(self.optimizer))

    @property
    def kind(self) -> str:
        """Which column of the evidence is about it."""
        return evidence_of(self.optimizer)

    def take_over(self, method: Method) -> Takeover | None:
        why = self.refused.get(method.takes_over or "")
        if why is not None:
            raise UsageError(f"method is {type(method).__name__} {why}")
        return take_over(method, self.optimizer, self.parameters)

    def candidates(self, adaptive: Adaptive, world: int) -> list[Candidate]:
        """What may be chosen."""
        if isinstance(self.optimizer, VelocityOptimizer):
            raise UsageError(
                f"optimizer is {type(self.optimizer).__name__}, which belongs to methods that own momentum, so that tw.Auto() and "
                "measure() have no others to choose from; name one, such as tw.DGC(density=0.01)"
            )
        if adaptive.among:
            return [Candidate(DENSE, Dense()), *map(named_candidate, adaptive.among)]
        return find_candidates(adaptive.quality, self.kind, world, takes_over=self._takes_over())

    def find_present(self, method: Method, world: int) -> Candidate:
        """A method that somebody has named: the candidate of any class that it is, or one of its own."""
        known = find_candidates("fastest", self.kind, world)
        known += self.candidates(Adaptive(quality="fastest"), world)
        own = replace(named_candidate(method), label=type(method).__name__)
        return next((one for one in known if one.method == method), own)

    def _takes_over(self) -> str | None:
        """What methods could take over from this optimizer."""
        return None if self._forbids() else TAKEN_FROM.get(self.kind)

    def find_objection(self) -> str:
        """Why methods cannot take over now what they usually do from an optimizer of this kind; nothing where they can."""
        return self._forbids() or self._has_to_wait()

    def _has_to_wait(self) -> str:
        """The divisor that is taken over stays; after a few steps it knows the first gradients only, which are the largest."""
        if self.optimizer is None or self.kind != ADAM:
            return ""
        steps = count_steps(self.optimizer)
        if steps >= LEARNED_STEPS:
            return ""
        return f"{steps} of {LEARNED_STEPS} steps have been taken in which Adam learns what to divide by"

    def _forbids(self) -> str:
        """Why it cannot be taken over, now or later."""
        name = TAKEN_FROM.get(self.kind)
        if name is None:
            return ""
        if momenta_of(self.optimizer) != self._momenta:
            return "the optimizer's momentum, or its parameter groups, are changed in mid-training, so that momentum has to stay there"
        return self._object_to(name)

    def lets_take_over(self, name: str) -> bool:
        """Whether methods could take that over from this optimizer."""
        return not self._object_to(name)

    def _object_to(self, name: str) -> str:
        try:
            self.take_over(OWNERS[name])
        except UsageError as error:
            return str(error)
        return ""


def momenta_of(optimizer: Optimizer | None) -> list[Any]:
    """Momentum of every parameter group, as the user has set it."""
    groups = () if optimizer is None else optimizer.param_groups
    settings = [group.get(TAKEN, group) for group in groups]
    return [(one.get("momentum"), one.get("betas")) for one in settings]


def named_candidate(method: Method) -> Candidate:
    density = getattr(method, "density", None)
    label = type(method).__name__.lower()
    return Candidate(label, method, density=density if isinstance(density, float) else None)
