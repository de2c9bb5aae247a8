"""The word-level language model of the papers: an embedding, two LSTM layers, a linear decoder."""

from __future__ import annotations

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
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.embedding.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.uniform_(self.decoder.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, carry: State | None = None) -> tuple[Tensor, State]:
        hidden, (h, c) = self.lstm(self.dropout(self.embedding(tokens)), carry)
        # Detached: gradients flow back to the beginning of the window, not of the stream.
        return self.decoder(self.dropout(hidden)), (h.detach(), c.detach())


def lstm(kind: Kind, tiny: bool) -> nn.Module:
    """ADTopk's, 2 x 500: 37,319,278 parameters on WikiText-2."""
    tokens = expect_kind("lstm", kind, Tokens)
    return WordModel(tokens.vocabulary, 16 if tiny else 500, layers=2, dropout=0.2)
