"""GPT-2 from transformers, small and large."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import (
    check_length,
    check_vocabulary,
    expect_kind,
    import_transformers,
)
from thinwire.recipes.models.weights import find_weights
from thinwire.recipes.objectives.tokens import Tokens

LONGEST = 1024
SMALL: dict[str, int] = {}
LARGE = {"n_embd": 1280, "n_layer": 36, "n_head": 20}
TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2}


class GPT2(nn.Module):
    """`model(tokens [B, T], carry)` gives (logits [B, T, words], None)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, carry: None = None) -> tuple[Tensor, None]:
        return self.model(tokens, use_cache=False).logits, None


def gpt2(kind: Kind, tiny: bool) -> nn.Module:
    """124,439,808 parameters with its own 50,257 tokens."""
    return _build("gpt2", kind, SMALL, tiny)


def gpt2_large(kind: Kind, tiny: bool) -> nn.Module:
    """774,030,080 parameters with its own 50,257 tokens."""
    return _build("gpt2-large", kind, LARGE, tiny)


def _build(name: str, kind: Kind, shape: dict[str, int], tiny: bool) -> nn.Module:
    tokens = expect_kind(name, kind, Tokens)
    check_length(name, tokens.length, LONGEST)
    package: Any = import_transformers(name)
    path = None if tiny else find_weights(name, name)
    if path is not None:
        model = package.GPT2LMHeadModel.from_pretrained(path, local_files_only=True)
        check_vocabulary(name, model.config.vocab_size, tokens.vocabulary)
    else:
        config = package.GPT2Config(
            **(TINY if tiny else shape), vocab_size=tokens.vocabulary, n_positions=LONGEST
        )
        model = package.GPT2LMHeadModel(config)
    return GPT2(model)
