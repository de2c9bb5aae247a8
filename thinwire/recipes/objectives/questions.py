"""Questions about a text, answered by a span of it (SQuAD)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.examples import Batch
from thinwire.recipes.kinds import Carry, Kind, Totals
from thinwire.recipes.objectives.answers import exact_match, f1

LONGEST_ANSWER = 30
"""In tokens."""
NOT_CONTEXT = -1
"""The offset of a token that is not of the text: the question, separators, padding."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one question of the test set is about and how people answered it."""

    context: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Questions(Kind):
    """Windows of a question and a piece of its text, [CLS] question [SEP] piece [SEP], padded to `length`.

    A training batch is (input_ids, attention_mask, token_type_ids: [B, T] int64, start, end: [B] int64, the first and last
    token of the answer, or 0 and 0 where the window does not hold it). A test batch holds all windows of some questions:
    (input_ids, attention_mask, token_type_ids, question [B] int64: place in `references`, offsets [B, T, 2] int64: where
    in the context each token begins and ends, NOT_CONTEXT if it is not of it). `model(input_ids, attention_mask,
    token_type_ids)` gives (start_logits [B, T], end_logits [B, T]).
    """

    headline: ClassVar[str] = "f1"
    higher_is_better: ClassVar[bool] = True

    vocabulary: int
    length: int
    """Tokens of a window, T."""
    references: Sequence[Reference] = field(default=(), repr=False)

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        ids, mask, types, start, end = batch
        start_logits, end_logits = model(ids, mask, types)
        both = functional.cross_entropy(start_logits.float(), start) + functional.cross_entropy(
            end_logits.float(), end
        )
        return both / 2, None

    def measure(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Totals, Carry]:
        """Take the best span of all windows of a question as its answer."""
        ids, mask, types, question, offsets = batch
        start_logits, end_logits = model(ids, mask, types)
        scores, spans = best_spans(start_logits.float(), end_logits.float(), offsets)
        best: dict[int, tuple[float, str]] = {}
        for number, score, (begin, end) in zip(
            question.tolist(), scores.tolist(), spans.tolist(), strict=True
        ):
            if score > best.get(number, (-math.inf, ""))[0] or number not in best:
                best[number] = (score, self.references[number].context[begin:end])
        pairs = [(text, self.references[number].answers) for number, (_, text) in best.items()]
        count = torch.tensor(len(pairs), device=ids.device)
        return {
            "f1": (torch.tensor(sum(f1(*pair) for pair in pairs), device=ids.device), count),
            "em": (torch.tensor(sum(exact_match(*p) for p in pairs), device=ids.device), count),
        }, None


def best_spans(start_logits: Tensor, end_logits: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """For each window the score [B] of its best span, and where that begins and ends in the context [B, 2].

    A span lies in the context, ends where it begins or later, and has at most LONGEST_ANSWER tokens. A window without
    any token of the context scores minus infinity, and its span is empty.
    """
    context = offsets[..., 0] != NOT_CONTEXT
    start = start_logits.masked_fill(~context, -math.inf)
    end = end_logits.masked_fill(~context, -math.inf)
    length = start.shape[1]
    shape = (*start.shape, min(LONGEST_ANSWER, length))
    # score[b, i, d] is that of the span of tokens i to i + d; what would run over the end stays at minus infinity.
    score = start.new_full(shape, -math.inf)
    for further in range(shape[2]):
        score[:, : length - further, further] = start[:, : length - further] + end[:, further:]
    values, places = score.flatten(1).max(1)
    first = places // shape[2]
    last = first + places % shape[2]
    window = torch.arange(len(places), device=places.device)
    spans = torch.stack([offsets[window, first, 0], offsets[window, last, 1]], dim=1)
    return values, torch.where(values[:, None] > -math.inf, spans, torch.zeros_like(spans))
