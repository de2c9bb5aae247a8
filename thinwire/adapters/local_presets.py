"""Published ways to take local steps, as settings of `LocalSteps`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.adapters.local_steps import LocalSteps
from thinwire.memory.residual import Residual
from thinwire.methods.base import Compose, Method
from thinwire.methods.quantized import Quantized
from thinwire.select.topk import ChunkwiseTopK
from thinwire.wire.format import Wire


def DiLoCo(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    every: int = 500,
    method: Method | None = None,
    lr: float = 0.7,
    momentum: float = 0.9,
    **settings: Any,
) -> LocalSteps:
    """Douillard et al. (2023): `every` inner steps, then Nesterov momentum over the mean of the differences.

    Args:
        model: As for `LocalSteps`.
        optimizer: The inner optimizer; AdamW in the paper.
        every: Inner steps between two rounds.
        method: How differences are sent; whole unless given.
        lr: Of the outer SGD.
        momentum: Of the outer SGD, Nesterov's.
        settings: Further ones of `LocalSteps`.
    """
    outer = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    return LocalSteps(model, optimizer, method, every=every, outer=outer, **settings)


def StreamingDiLoCo(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    every: int = 100,
    fragments: int = 4,
    delay: int = 5,
    lr: float = 0.4,
    momentum: float = 0.9,
    **settings: Any,
) -> LocalSteps:
    """Douillard et al. (2025): fragments in turn, in 4 bits, while inner steps go on; half of each meets the common point.

    Args:
        model: As for `LocalSteps`.
        optimizer: The inner optimizer.
        every: Inner steps from one round of a fragment to its next.
        fragments: Parts of the model that take turns.
        delay: Inner steps that a round may take.
        lr: Of the outer SGD.
        momentum: Of the outer SGD, Nesterov's.
        settings: Further ones of `LocalSteps`.
    """
    method = settings.pop("method", None) or Quantized(bits=4)
    outer = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    return LocalSteps(
        model,
        optimizer,
        method,
        every=every,
        outer=outer,
        fragments=fragments,
        delay=delay,
        **settings,
    )


def SparseLoCo(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    every: int = 30,
    density: float = 1 / 64,
    chunk: int = 4096,
    decay: float = 0.95,
    lr: float = 1.0,
    **settings: Any,
) -> LocalSteps:
    """Sarfi et al. (2025): the largest entries of every chunk in 2 bits, a decayed residual in place of outer momentum.

    Args:
        model: As for `LocalSteps`.
        optimizer: The inner optimizer; AdamW in the paper.
        every: Inner steps between two rounds; 15 to 250 in the paper.
        density: Fraction of each chunk that is sent.
        chunk: Elements of a chunk.
        decay: What is kept of the residual from round to round; the rest is forgotten, as published.
        lr: Of the outer SGD, which has no momentum.
        settings: Further ones of `LocalSteps`.
    """
    method = Compose(
        select=ChunkwiseTopK(density, chunk=chunk),
        memory=Residual(beta=decay),
        wire=Wire(values="int2", indices="rice"),
    )
    return LocalSteps(model, optimizer, method, every=every, outer={"lr": lr}, **settings)
