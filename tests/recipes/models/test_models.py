from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
from torch import nn

from tests.recipes.models import kinds
from tests.recipes.models.kinds import SMALL, draw
from thinwire.errors import UsageError
from thinwire.recipes.kinds import Kind
from thinwire.recipes.models import MODELS
from thinwire.recipes.objectives.images import Images
from thinwire.recipes.objectives.speech import Speech
from thinwire.recipes.objectives.tokens import Tokens

OF_TRANSFORMERS = {"vit-large", "gpt2", "gpt2-large", "bert-base", "bert-large", "minilm"}
FITTING = {
    **dict.fromkeys(["lstm", "transformer", "small-gpt", "gpt2", "gpt2-large"], ("tokens",)),
    **dict.fromkeys(["bert-base", "bert-large", "minilm"], ("questions", "pretraining")),
    "deepspeech": ("speech",),
}
PAIRS = [(name, kind) for name in MODELS for kind in FITTING.get(name, ("images",))]


def build(name: str, kind: Kind, tiny: bool) -> nn.Module:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    module, _, function = MODELS[name].partition(":")
    return getattr(importlib.import_module(module), function)(kind, tiny)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "kind", "parameters"),
    [
        ("small-cnn", Images(channels=1, height=8, width=8, classes=10), 151_306),
        ("cnn", kinds.MNIST, 21_840),
        ("mlp", kinds.MNIST, 669_706),
        ("resnet20", kinds.CIFAR10, 269_722),
        ("resnet110", kinds.CIFAR10, 1_727_962),
        ("vgg16", kinds.CIFAR10, 14_728_266),
        ("vgg16", kinds.CIFAR100, 14_774_436),
        ("resnet50", kinds.CIFAR100, 23_705_252),
        ("resnet50", kinds.IMAGENET, 25_557_032),
        ("resnet152", kinds.IMAGENET, 60_192_808),
        ("vgg16bn", kinds.IMAGENET, 138_365_992),
        ("vit-large", kinds.IMAGENET, 304_326_632),
        ("lstm", kinds.WORDS, 37_319_278),
        ("transformer", Tokens(vocabulary=33278, length=100), 34_408_478),
        ("small-gpt", Tokens(vocabulary=33278, length=128), 11_711_488),
        ("gpt2", kinds.PIECES, 124_439_808),
        ("gpt2-large", kinds.PIECES, 774_030_080),
        ("bert-base", kinds.SQUAD, 108_893_186),
        ("bert-large", kinds.SQUAD, 334_094_338),
        ("minilm", kinds.SQUAD, 22_566_146),
        ("minilm", kinds.WIKIPEDIA, 34_613_564),
        ("bert-base", kinds.WIKIPEDIA, 133_547_324),
        ("deepspeech", kinds.AN4, 27_569_568),
    ],
)
def test_full_models_have_the_published_sizes(name: str, kind: Kind, parameters: int) -> None:
    with torch.device("meta"):
        assert count(build(name, kind, tiny=False)) == parameters


@pytest.mark.parametrize(("name", "kind_name"), PAIRS)
def test_the_tiny_form_learns_with_every_parameter(name: str, kind_name: str) -> None:
    torch.manual_seed(0)
    kind = SMALL[kind_name]
    model = build(name, kind, tiny=True)
    assert count(model) < 150_000
    loss, carry = kind.loss(model, draw(kind), None)
    loss.backward()
    assert loss.isfinite()
    for parameter, values in model.named_parameters():
        assert values.grad is not None, parameter
        assert values.grad.isfinite().all(), parameter
    loss, _ = kind.loss(model, draw(kind), carry)
    assert loss.isfinite()


@pytest.mark.parametrize(("name", "kind_name"), PAIRS)
def test_the_tiny_form_is_measured(name: str, kind_name: str) -> None:
    torch.manual_seed(0)
    kind = SMALL[kind_name]
    model = build(name, kind, tiny=True).eval()
    with torch.no_grad():
        totals, _ = kind.measure(model, draw(kind, test=True), None)
    metrics = kind.summarise({n: (float(a), float(b)) for n, (a, b) in totals.items()})
    assert kind.headline in metrics
    assert all(value >= 0 for value in metrics.values())


@pytest.mark.parametrize(("name", "kind_name"), PAIRS)
def test_the_global_generator_decides_the_weights(name: str, kind_name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(
            torch.cat([p.flatten() for p in build(name, SMALL[kind_name], True).parameters()])
        )
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize("name", MODELS)
def test_a_misfit_is_one_sentence(name: str) -> None:
    wrong = SMALL["speech" if name != "deepspeech" else "tokens"]
    with pytest.raises(UsageError, match=f"model is '{name}', which learns from .*; the data are "):
        build(name, wrong, tiny=True)


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("cnn", Images(channels=1, height=8, width=8, classes=10), "at least 16 x 16; they are 8"),
        ("vit-large", kinds.MNIST, "a multiple of 16 pixels; they are 28 x 28"),
        ("gpt2", Tokens(vocabulary=9, length=2000), "reads 1024 tokens; the data have 2000"),
    ],
)
def test_sizes_that_do_not_fit(name: str, kind: Kind, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(name, kind, tiny=False)


@pytest.mark.parametrize("name", sorted(OF_TRANSFORMERS))
def test_without_transformers_a_sentence_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    module, _, function = MODELS[name].partition(":")
    kind = SMALL[FITTING.get(name, ("images",))[0]]
    with pytest.raises(UsageError, match=f"model is '{name}', which needs the package 'transf"):
        getattr(importlib.import_module(module), function)(kind, True)


def test_an_lstm_goes_on_where_it_was() -> None:
    torch.manual_seed(0)
    model = build("lstm", SMALL["tokens"], tiny=True).eval()
    tokens = torch.randint(50, (3, 10))
    whole, _ = model(tokens, None)
    first, carry = model(tokens[:, :4], None)
    second, carry = model(tokens[:, 4:], carry)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    assert not any(state.requires_grad for state in carry)


@pytest.mark.parametrize("name", ["transformer", "small-gpt", "gpt2"])
def test_no_token_sees_those_behind_it(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, SMALL["tokens"], tiny=True).eval()
    tokens = torch.randint(50, (2, 12))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 50
    one, other = model(tokens, None)[0], model(changed, None)[0]
    torch.testing.assert_close(one[:, :6], other[:, :6])
    assert not torch.allclose(one[:, 6:], other[:, 6:])


@pytest.mark.parametrize("kind_name", ["questions", "pretraining"])
def test_bert_does_not_see_padding(kind_name: str) -> None:
    torch.manual_seed(0)
    kind = SMALL[kind_name]
    model = build("bert-base", kind, tiny=True).eval()
    ids, mask, types, *_ = draw(kind)
    changed = torch.where(mask.bool(), ids, (ids + 1) % 50)
    assert not torch.equal(changed, ids)
    keep = mask.bool()
    torch.testing.assert_close(
        model(ids, mask, types)[0][keep], model(changed, mask, types)[0][keep]
    )


def test_speech_does_not_depend_on_its_padding() -> None:
    torch.manual_seed(0)
    kind = SMALL["speech"]
    assert isinstance(kind, Speech)
    model = build("deepspeech", kind, tiny=True).eval()
    features, lengths = torch.randn(2, 31, kind.features), torch.tensor([31, 18])
    features[1, 18:] = 0.0
    together, out_lengths = model(features, lengths)
    alone, _ = model(features[1:, :18], lengths[1:])
    assert out_lengths.tolist() == [16, 9]
    assert together.shape == (2, 16, len(kind.alphabet))
    torch.testing.assert_close(together[1:, :9], alone)


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="compares with torchvision"
)
@pytest.mark.parametrize("name", ["resnet50", "resnet152", "vgg16_bn"])
def test_our_definitions_are_torchvisions(name: str) -> None:
    import torchvision

    from thinwire.recipes.models.resnet import ResNet
    from thinwire.recipes.models.vgg import make_vgg16bn

    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)(weights=None)
        blocks = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}
        ours = (
            ResNet(kinds.IMAGENET, blocks[name], width=64)
            if name in blocks
            else make_vgg16bn(kinds.IMAGENET, tiny=False)
        )
    assert {n: p.shape for n, p in ours.state_dict().items()} == {
        n: p.shape for n, p in theirs.state_dict().items()
    }
