"""BERT's pretraining: guess the masked tokens, and whether the second sentence follows the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.examples import Batch
from thinwire.recipes.kinds import Carry, Kind, Totals
from thinwire.recipes.objectives.tokens import exponential

NOT_MASKED = -100
"""The target of a token that is not to be guessed."""


@dataclass(frozen=True, kw_only=True)
class Pretraining(Kind):
    """A batch is (input_ids, attention_mask, token_type_ids, masked_targets: all [B, T] int64, is_next [B] int64).

    `masked_targets` holds the token where it is to be guessed and NOT_MASKED elsewhere; `is_next` is 1 if the second
    sentence follows the first. `model(input_ids, attention_mask, token_type_ids)` gives (token_logits [B, T, vocabulary],
    next_logits [B, 2]).
    """

    headline: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False

    vocabulary: int
    length: int
    """Tokens of an example, T."""

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        totals = self._surprise(model, batch)
        tokens, masked = totals["masked"]
        sentences, pairs = totals["next"]
        # A batch in which nothing was masked adds nothing, rather than 0 / 0.
        return tokens / masked.clamp(min=1) + sentences / pairs, None

    def measure(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Totals, Carry]:
        return self._surprise(model, batch), None

    def summarise(self, totals: dict[str, tuple[float, float]]) -> dict[str, float]:
        means = super().summarise(totals)
        return {
            "loss": means["masked"] + means["next"],
            "masked_perplexity": exponential(means["masked"]),
            "next_accuracy": means["next_accuracy"],
        }

    def _surprise(self, model: nn.Module, batch: Batch) -> Totals:
        ids, mask, types, masked_targets, is_next = batch
        token_logits, next_logits = model(ids, mask, types)
        tokens = functional.cross_entropy(
            token_logits.flatten(0, 1).float(),
            masked_targets.flatten(),
            ignore_index=NOT_MASKED,
            reduction="sum",
        )
        sentences = functional.cross_entropy(next_logits.float(), is_next, reduction="sum")
        pairs = is_next.new_tensor(len(is_next))
        return {
            "masked": (tokens, (masked_targets != NOT_MASKED).sum()),
            "next": (sentences, pairs),
            "next_accuracy": ((next_logits.argmax(1) == is_next).sum(), pairs),
        }
