"""Models of the step benchmark: random weights from a configuration, synthetic data on the device.

Nothing is downloaded. transformers and torchvision are imported only when one of their models is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.errors import UsageError

CLASSES = 1000
IMAGE_SIZE = 224


@dataclass(frozen=True)
class Workload:
    """A model, and how a batch for it is drawn and judged."""

    model: nn.Module
    draw: Callable[[], Any]
    """One batch from torch's global generator, on its default device."""
    loss: Callable[[nn.Module, Any], Tensor]
    """The loss of a batch under the model as DDP wraps it."""


@dataclass(frozen=True)
class ModelSpec:
    """A named model: the batch it is measured with, and how it is built."""

    batch: int
    length: int | None
    """Tokens per sample; None for models that read images or features."""
    build: Callable[[torch.device, int, int | None], Workload]


def find_model(name: str) -> ModelSpec:
    """A model by its name, or the user's own as 'module:function'."""
    if name in MODELS:
        return MODELS[name]
    module_name, _, attribute = name.partition(":")
    if not attribute:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(
            f"model is {name!r}; it must be one of {', '.join(MODELS)} or your own as module:function{hint}"
        )
    if str(Path.cwd()) not in sys.path:  # a console script does not look there by itself
        sys.path.append(str(Path.cwd()))
    function = getattr(_import(module_name, f"model is {name!r}"), attribute, None)
    if not callable(function):
        raise UsageError(f"model is {name!r}, but {module_name} has no function {attribute}")
    return ModelSpec(32, None, lambda device, batch, length: function(device, batch))


def build_workload(
    name: str, device: torch.device, batch: int, length: int | None, seed: int
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """(model, loss of one batch): the same weights on every rank, data that differ with `seed`."""
    spec = find_model(name)
    with torch.device(device):
        torch.manual_seed(0)
        workload = spec.build(device, batch, length)
        if not isinstance(workload, Workload):
            raise UsageError(
                f"model is {name!r}, but it returned a {type(workload).__name__}; it must return a "
                "thinwire.bench.models.Workload"
            )
        torch.manual_seed(1 + seed)
        data = workload.draw()
    return workload.model, lambda wrapped: workload.loss(wrapped, data)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _small(device: torch.device, batch: int, length: int | None) -> Workload:
    """1.05 M parameters in three layers: a step takes a few milliseconds on one core."""
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]
    return _classifier(nn.Sequential(*layers), (512,), 10, batch)


class WordModel(nn.Module):
    """The language model of the word-level benchmarks: embedding, two LSTM layers, a linear decoder."""

    def __init__(self, words: int = 33278, width: int = 650) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.embedding(tokens))[0])


def _lstm(device: torch.device, batch: int, length: int | None) -> Workload:
    model = WordModel()

    def draw() -> Tensor:
        return torch.randint(model.embedding.num_embeddings, (batch, (length or 35) + 1))

    def loss(wrapped: nn.Module, tokens: Tensor) -> Tensor:
        words = wrapped(tokens[:, :-1])
        return functional.cross_entropy(words.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return Workload(model, draw, loss)


def _bert(**shape: int) -> Callable[[torch.device, int, int | None], Workload]:
    """BERT with the question-answering head: every parameter gets a gradient."""

    def build(device: torch.device, batch: int, length: int | None) -> Workload:
        package = _import("transformers", "this model")
        config = package.BertConfig(**shape)
        tokens = length or 384

        def draw() -> dict[str, Tensor]:
            start, end = torch.randint(tokens, (2, batch))
            words = torch.randint(config.vocab_size, (batch, tokens))
            return {"input_ids": words, "start_positions": start, "end_positions": end}

        return Workload(package.BertForQuestionAnswering(config), draw, _own_loss)

    return build


def _gpt2(**shape: int) -> Callable[[torch.device, int, int | None], Workload]:
    def build(device: torch.device, batch: int, length: int | None) -> Workload:
        package = _import("transformers", "this model")
        config = package.GPT2Config(**shape, use_cache=False)

        def draw() -> dict[str, Tensor]:
            tokens = torch.randint(config.vocab_size, (batch, length or 512))
            return {"input_ids": tokens, "labels": tokens}

        return Workload(package.GPT2LMHeadModel(config), draw, _own_loss)

    return build


def _vit_large(device: torch.device, batch: int, length: int | None) -> Workload:
    package = _import("transformers", "model vit-large")
    config = package.ViTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=CLASSES,
    )

    def draw() -> dict[str, Tensor]:
        pixels = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
        return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (batch,))}

    return Workload(package.ViTForImageClassification(config), draw, _own_loss)


def _torchvision(name: str) -> Callable[[torch.device, int, int | None], Workload]:
    def build(device: torch.device, batch: int, length: int | None) -> Workload:
        model = getattr(_import("torchvision.models", f"model {name}"), name)(weights=None)
        return _classifier(model, (3, IMAGE_SIZE, IMAGE_SIZE), CLASSES, batch)

    return build


def _classifier(model: nn.Module, shape: tuple[int, ...], classes: int, batch: int) -> Workload:
    def draw() -> tuple[Tensor, Tensor]:
        return torch.randn(batch, *shape), torch.randint(classes, (batch,))

    def loss(wrapped: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(wrapped(data[0]).float(), data[1])

    return Workload(model, draw, loss)


def _own_loss(wrapped: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """transformers' models compute their loss themselves."""
    return wrapped(**data).loss


def _import(module: str, who: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UsageError(
            f"{who} needs the package {error.name!r}, which is not installed"
        ) from None


_BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}

MODELS: dict[str, ModelSpec] = {
    "small": ModelSpec(32, None, _small),
    "lstm": ModelSpec(20, 35, _lstm),
    "resnet50": ModelSpec(64, None, _torchvision("resnet50")),
    "resnet152": ModelSpec(32, None, _torchvision("resnet152")),
    "vgg16": ModelSpec(32, None, _torchvision("vgg16_bn")),
    "vit-large": ModelSpec(16, None, _vit_large),
    "bert-base": ModelSpec(16, 384, _bert()),
    "bert-large": ModelSpec(8, 384, _bert(**_BERT_LARGE)),
    "gpt2": ModelSpec(8, 512, _gpt2()),
    "gpt2-large": ModelSpec(4, 512, _gpt2(n_embd=1280, n_layer=36, n_head=20)),
}
