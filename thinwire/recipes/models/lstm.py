"""The word-level language model of the papers: an embedding, two LSTM layers, a linear decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import expect_kind
from thinwire.recipes.objectives.tokens import Tokens

State = tuple[Tensor, Tensor]

INITIAL_RANGE = 0.1


class WordModel(nn.Module):
    """`model(tokens [B, T], carry)` gives (logits [B, T, words], carry); the carry lets a stream go on where it was."""

    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, width)
        # Single layers: dropout inside a stack of them draws from a state of cuDNN's, which no CUDA graph can follow.
        self.lstm = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.embedding.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.uniform_(self.decoder.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, carry: State | None = None) -> tuple[Tensor, State]:
        hidden, ends = self.embedding(tokens), []
        for i, layer in enumerate(self.lstm):
            begin = None if carry is None else (carry[0][i : i + 1], carry[1][i : i + 1])
            hidden, end = layer(self.dropout(hidden), begin)
            ends.append(end)
        # Detached: gradients flow back to the beginning of the window, not of the stream.
        h, c = (torch.cat(states).detach() for states in zip(*ends, strict=True))
        return self.decoder(self.dropout(hidden)), (h, c)


def lstm(kind: Kind, tiny: bool) -> nn.Module:
    """ADTopk's, 2 x 500: 37,319,278 parameters on WikiText-2."""
    tokens = expect_kind("lstm", kind, Tokens)
    return WordModel(tokens.vocabulary, 16 if tiny else 500, layers=2, dropout=0.2)
