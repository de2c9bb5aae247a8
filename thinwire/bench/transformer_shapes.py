"""Models by the shapes of transformers' configurations: T5-like and Llama-like, random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.own_models import Workload
from thinwire.recipes.models.fitting import import_transformers

Make = Callable[[torch.device, int, int | None], Workload]

T5_BASE = {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 12, "num_heads": 12}
T5_LARGE = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 24, "num_heads": 16}
LLAMA_160M = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
VOCABULARY = 32000
USUAL_LENGTH = 512


def t5_like(name: str, shape: Mapping[str, int]) -> Make:
    """An encoder and a decoder; the decoder predicts as many tokens as the encoder reads."""

    def make(device: torch.device, batch: int, length: int | None) -> Workload:
        package: Any = import_transformers(name)
        config = package.T5Config(
            **shape, vocab_size=VOCABULARY, decoder_start_token_id=0, dropout_rate=0.0
        )
        return of_tokens(package.T5ForConditionalGeneration(config), batch, length)

    return make


def llama_like(name: str, shape: Mapping[str, int]) -> Make:
    """A decoder with gated layers, rotary positions and, in the larger one, shared keys."""

    def make(device: torch.device, batch: int, length: int | None) -> Workload:
        package: Any = import_transformers(name)
        config = package.LlamaConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=2048)
        return of_tokens(package.LlamaForCausalLM(config), batch, length)

    return make


def of_tokens(model: nn.Module, batch: int, length: int | None) -> Workload:
    """Tokens in, tokens as labels; the model's own loss."""

    def draw() -> tuple[Tensor, Tensor]:
        read, said = torch.randint(VOCABULARY, (2, batch, length or USUAL_LENGTH))
        return read, said

    def loss(wrapped: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return wrapped(input_ids=data[0], labels=data[1], use_cache=False).loss

    return Workload(model, draw, loss)
