"""Language models of the GPT kind in plain torch: pre-norm blocks of causal attention and two linear layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import expect_kind
from thinwire.recipes.objectives.tokens import Tokens

INITIAL_STD = 0.02


class Attention(nn.Module):
    """Every token looks at itself and at those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        assert width % heads == 0
        self.heads = heads
        self.dropout = dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.grow = nn.Linear(width, hidden)
        self.shrink = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.shrink(functional.gelu(self.grow(self.norm2(x)))))


class Transformer(nn.Module):
    """`model(tokens [B, T], carry)` gives (logits [B, T, words], None); T is at most `length`."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        layers: int,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens.vocabulary, width)
        self.positions = nn.Embedding(tokens.length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, tokens.vocabulary, bias=not tied)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the residual stream shrinks with depth, so that the stream does not grow.
                into_stream = name.endswith(("output.weight", "shrink.weight"))
                std = INITIAL_STD / math.sqrt(2 * layers) if into_stream else INITIAL_STD
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor, carry: None = None) -> tuple[Tensor, None]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        return self.decoder(self.norm(self.blocks(x))), None


def transformer(kind: Kind, tiny: bool) -> nn.Module:
    """ADTopk's sizes: 8 layers of width 400, feed-forward 400; 34,408,478 parameters on WikiText-2."""
    tokens = expect_kind("transformer", kind, Tokens)
    if tiny:
        return Transformer(tokens, layers=2, width=16, heads=2, hidden=16, dropout=0.2, tied=False)
    return Transformer(tokens, layers=8, width=400, heads=10, hidden=400, dropout=0.2, tied=False)


def small_gpt(kind: Kind, tiny: bool) -> nn.Module:
    """4 layers of width 256, the decoder tied to the embedding: 11,704,320 parameters on WikiText-2 (33,278 words)."""
    tokens = expect_kind("small-gpt", kind, Tokens)
    if tiny:
        return Transformer(tokens, layers=2, width=16, heads=2, hidden=64, dropout=0.1, tied=True)
    return Transformer(tokens, layers=4, width=256, heads=8, hidden=1024, dropout=0.1, tied=True)
