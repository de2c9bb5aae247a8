"""Models of the step benchmark: the recipes' models with random weights, synthetic data on the device.

Nothing is downloaded. transformers and torchvision are imported only when one of their models is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.bench.own_models import Workload, import_function, to_workload
from thinwire.bench.transformer_shapes import (
    LLAMA_1B,
    LLAMA_160M,
    T5_BASE,
    T5_LARGE,
    llama_like,
    t5_like,
)
from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.bert import bert_base, bert_large
from thinwire.recipes.models.gpt2 import gpt2, gpt2_large
from thinwire.recipes.models.lstm import WordModel
from thinwire.recipes.models.resnet import resnet50, resnet152
from thinwire.recipes.models.vgg import vgg16bn
from thinwire.recipes.models.vit import vit_large
from thinwire.recipes.objectives.images import Images
from thinwire.recipes.objectives.questions import Questions
from thinwire.recipes.objectives.tokens import Tokens
from thinwire.tools.settings.names import check_name

IMAGES = Images(channels=3, height=224, width=224, classes=1000)

Build = Callable[[Kind, bool], nn.Module]
"""As the recipes build their models; the second says whether the two-layer form is wanted."""


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
    if ":" not in name:
        check_name("model", name, MODELS, " or your own as module:function")
    function = import_function(name)
    return ModelSpec(
        32, None, lambda device, batch, length: to_workload(name, function(device, batch))
    )


def build_workload(
    name: str, device: torch.device, batch: int, length: int | None, seed: int
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """(model, loss of one batch): the same weights on every rank, data that differ with `seed`."""
    spec = find_model(name)
    with torch.device(device):
        torch.manual_seed(0)
        workload = spec.build(device, batch, length)
        torch.manual_seed(1 + seed)
        data = workload.draw()
    return workload.model, lambda wrapped: workload.loss(wrapped, data)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _small(device: torch.device, batch: int, length: int | None) -> Workload:
    """1.05 M parameters in three layers: a step takes a few milliseconds on one core."""
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]
    return _classifier(nn.Sequential(*layers), (512,), 10, batch)


def _images(build: Build) -> Callable[[torch.device, int, int | None], Workload]:
    def make(device: torch.device, batch: int, length: int | None) -> Workload:
        return _classifier(
            build(IMAGES, False),
            (IMAGES.channels, IMAGES.height, IMAGES.width),
            IMAGES.classes,
            batch,
        )

    return make


def _tokens(
    build: Build, vocabulary: int, usual: int
) -> Callable[[torch.device, int, int | None], Workload]:
    """A language model; every token is to be predicted."""

    def make(device: torch.device, batch: int, length: int | None) -> Workload:
        kind = Tokens(vocabulary=vocabulary, length=length or usual)

        def draw() -> tuple[Tensor, Tensor]:
            tokens = torch.randint(vocabulary, (batch, kind.length + 1))
            return tokens[:, :-1], tokens[:, 1:]

        return Workload(
            build(kind, False), draw, lambda model, data: kind.loss(model, data, None)[0]
        )

    return make


def _questions(build: Build) -> Callable[[torch.device, int, int | None], Workload]:
    """BERT with the question-answering head: every parameter gets a gradient. Nothing is padded, so there is no mask."""

    def make(device: torch.device, batch: int, length: int | None) -> Workload:
        kind = Questions(vocabulary=30522, length=length or 384)

        def draw() -> tuple[Tensor, None, None, Tensor, Tensor]:
            start, end = torch.randint(kind.length, (2, batch))
            return torch.randint(kind.vocabulary, (batch, kind.length)), None, None, start, end

        return Workload(
            build(kind, False), draw, lambda model, data: kind.loss(model, data, None)[0]
        )

    return make


def _wide_lstm(kind: Kind, tiny: bool) -> nn.Module:
    """The medium model of the word-level benchmarks, without dropout."""
    assert isinstance(kind, Tokens)
    return WordModel(kind.vocabulary, 650, layers=2, dropout=0.0)


def _classifier(model: nn.Module, shape: tuple[int, ...], classes: int, batch: int) -> Workload:
    def draw() -> tuple[Tensor, Tensor]:
        return torch.randn(batch, *shape), torch.randint(classes, (batch,))

    def loss(wrapped: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(wrapped(data[0]).float(), data[1])

    return Workload(model, draw, loss)


MODELS: dict[str, ModelSpec] = {
    "small": ModelSpec(32, None, _small),
    "lstm": ModelSpec(20, 35, _tokens(_wide_lstm, 33278, 35)),
    "resnet50": ModelSpec(64, None, _images(resnet50)),
    "resnet152": ModelSpec(32, None, _images(resnet152)),
    "vgg16": ModelSpec(32, None, _images(vgg16bn)),
    "vit-large": ModelSpec(16, None, _images(vit_large)),
    "bert-base": ModelSpec(16, 384, _questions(bert_base)),
    "bert-large": ModelSpec(8, 384, _questions(bert_large)),
    "gpt2": ModelSpec(8, 512, _tokens(gpt2, 50257, 512)),
    "gpt2-large": ModelSpec(4, 512, _tokens(gpt2_large, 50257, 512)),
    "t5-base": ModelSpec(8, 512, t5_like("t5-base", T5_BASE)),
    "t5-large": ModelSpec(4, 512, t5_like("t5-large", T5_LARGE)),
    "llama-160m": ModelSpec(8, 512, llama_like("llama-160m", LLAMA_160M)),
    "llama-1b": ModelSpec(2, 512, llama_like("llama-1b", LLAMA_1B)),
}
