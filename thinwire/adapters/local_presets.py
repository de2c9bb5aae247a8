"""Published ways to take local steps, as settings of `LocalSteps`."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.adapters.local_settings import NESTEROV
from thinwire.adapters.local_steps import LocalSteps
from thinwire.memory.residual import Residual
from thinwire.methods.base import Compose
from thinwire.methods.quantized import Quantized
from thinwire.select.topk import ChunkwiseTopK
from thinwire.wire.format import Wire

STREAMING = MappingProxyType({**NESTEROV, "lr": 0.4})
PLAIN = MappingProxyType({"lr": 1.0})


def DiLoCo(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: int = 500,
    **settings: Any,
) -> LocalSteps:
    """Douillard et al. (2023): `every` inner steps, then an outer SGD with Nesterov momentum over the mean of the differences.

    Args:
        model: As for `LocalSteps`.
        optimizer: As for `LocalSteps`; AdamW in the paper.
        every: Inner steps between two rounds.
        settings: Further ones of `LocalSteps`, whose own are those of this paper: differences are sent whole, and the outer
            SGD has rate 0.7 and momentum 0.9.
    """
    return LocalSteps(model, optimizer, every=every, **settings)


def StreamingDiLoCo(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: int = 100,
    fragments: int = 4,
    delay: int = 5,
    **settings: Any,
) -> LocalSteps:
    """Douillard et al. (2025): fragments in turn, in 4 bits, while inner steps go on; half of each meets the common point.

    Args:
        model: As for `LocalSteps`.
        optimizer: As for `LocalSteps`.
        every: Inner steps from one round of a fragment to its next.
        fragments: Parts of the model that take turns.
        delay: Inner steps that a round may take.
        settings: Further ones of `LocalSteps`. The outer SGD has rate 0.4 and Nesterov momentum 0.9.
    """
    published = {"method": Quantized(bits=4), "outer": STREAMING}
    settings = {**published, "every": every, "fragments": fragments, "delay": delay, **settings}
    return LocalSteps(model, optimizer, **settings)


def SparseLoCo(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: int = 30,
    density: float = 1 / 64,
    chunk: int = 4096,
    decay: float = 0.95,
    **settings: Any,
) -> LocalSteps:
    """Sarfi et al. (2025): the largest entries of every chunk in 2 bits, a decayed residual in place of outer momentum.

    Args:
        model: As for `LocalSteps`.
        optimizer: As for `LocalSteps`; AdamW in the paper.
        every: Inner steps between two rounds; 15 to 250 in the paper.
        density: Fraction of each chunk that is sent.
        chunk: Elements of a chunk.
        decay: What is kept of the residual from round to round; the rest is forgotten, as published.
        settings: Further ones of `LocalSteps`. The outer SGD has rate 1 and no momentum.
    """
    method = Compose(
        select=ChunkwiseTopK(density, chunk=chunk),
        memory=Residual(beta=decay),
        wire=Wire(values="int2", indices="rice"),
    )
    return LocalSteps(model, optimizer, method, every=every, **{"outer": PLAIN, **settings})
