"""Which takeover a method needs for an optimizer. One for another optimizer is a class, and a line here that registers it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from thinwire.errors import UsageError
from thinwire.methods.base import ADAM_TAKEOVER, MOMENTUM_TAKEOVER, Method
from thinwire.optim.adam import AdamTakeover
from thinwire.optim.base import Takeover
from thinwire.optim.known import KnownOptimizers, evidence_of
from thinwire.optim.momentum import MomentumTakeover, VelocityTakeover
from thinwire.optim.velocity import VelocityOptimizer
from thinwire.plan.candidates import ADAM

logger = logging.getLogger(__name__)

MakeTakeover = Callable[[Method, Optimizer, Mapping[str, nn.Parameter]], Takeover]
"""Makes a takeover, checked but not yet done."""


@dataclass(frozen=True)
class Kind:
    """What methods may take over, and from which optimizers."""

    allowed: str
    """The optimizers in the words of a sentence."""
    makers: KnownOptimizers[MakeTakeover] = field(default_factory=KnownOptimizers)


TAKEOVERS = {
    MOMENTUM_TAKEOVER: Kind(
        "can take momentum over from torch.optim.SGD and tw.optim.DGCSGD; with Adam and AdamW use tw.AdamScale(method=...)"
    ),
    ADAM_TAKEOVER: Kind("can take over from torch.optim.Adam and torch.optim.AdamW"),
}
"""By what a method says it `takes_over`."""
TAKEOVERS[MOMENTUM_TAKEOVER].makers.register(SGD, MomentumTakeover.check)
TAKEOVERS[MOMENTUM_TAKEOVER].makers.register(VelocityOptimizer, VelocityTakeover.check, heirs=True)
TAKEOVERS[ADAM_TAKEOVER].makers.register(Adam, AdamTakeover.check)
TAKEOVERS[ADAM_TAKEOVER].makers.register(AdamW, AdamTakeover.check)


def take_over(
    method: Method, optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> Takeover | None:
    """What has to be taken over for this method, checked but not yet done; None if it leaves the optimizer alone."""
    kind = method.takes_over
    if kind is None:
        warn_of_plain_adam(method, optimizer)
        return None
    if optimizer is None:
        raise UsageError(
            f"{type(method).__name__} applies momentum before compression; pass attach(..., optimizer=opt), so that it can be "
            "taken over"
        )
    make = TAKEOVERS[kind].makers.find(optimizer)
    if make is None:
        raise UsageError(
            f"optimizer is {type(optimizer).__name__}; {type(method).__name__} {TAKEOVERS[kind].allowed}"
        )
    return make(method, optimizer, parameters)


def warn_of_plain_adam(method: Method, optimizer: Optimizer | None) -> None:
    """Say once, on one rank, what to do where Adam would divide by the size of compressed gradients."""
    others = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    if others or method.suits_adam or evidence_of(optimizer) != ADAM:
        return
    logger.warning(
        "%s before %s learns much less than dense training does: Adam divides by the size of gradients, of which most entries "
        "are held back; use more bits per element or, unless the model is sharded, tw.AdamScale(method=...) with optimizer=opt",
        type(method).__name__,
        type(optimizer).__name__,
    )
