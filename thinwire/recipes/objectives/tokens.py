"""Streams of tokens: every token is predicted from those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.examples import Batch
from thinwire.recipes.kinds import Carry, Kind, Totals

LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class Tokens(Kind):
    """A batch is (inputs [B, T] int64, targets [B, T] int64: the token that follows each input).

    `model(inputs, carry)` gives (logits [B, T, vocabulary], carry): None from a model that forgets, detached tensors from
    one that remembers.
    """

    headline: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False

    vocabulary: int
    length: int
    """Tokens of a window, T; the last window of a stream may be shorter."""

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        inputs, targets = batch
        logits, carry = model(inputs, carry)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), carry

    def measure(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Totals, Carry]:
        inputs, targets = batch
        logits, carry = model(inputs, carry)
        surprise = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        count = targets.new_tensor(targets.numel())
        return {"surprise": (surprise.double().sum(), count)}, carry

    def summarise(self, totals: dict[str, tuple[float, float]]) -> dict[str, float]:
        surprise, count = totals["surprise"]
        return {"perplexity": exponential(surprise / count)}


def exponential(mean_surprise: float) -> float:
    """Perplexity of a mean negative log-likelihood; infinite where a float ends, as in a run that blew up."""
    return math.inf if mean_surprise > LARGEST_EXPONENT else math.exp(mean_surprise)
