from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from thinwire.recipes.data import DATASETS
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.models import MODELS
from thinwire.recipes.presets import PRESETS
from thinwire.recipes.tasks import find_task

OF_THE_PAPERS = {
    *("digits", "mnist", "fashion-mnist", "cifar10-resnet20", "cifar10-resnet110"),
    *("cifar10-vgg16", "cifar100-vgg16", "cifar100-resnet50", "imagenet-resnet50"),
    *("imagenet-resnet152", "imagenet-vgg16bn", "imagenet-vit-large", "wikitext2-lstm"),
    *("wikitext2-transformer", "wikitext2-gpt2", "wikitext2-gpt2-large", "wikitext103-gpt2"),
    *("wikitext103-gpt2-large", "squad-bert-base", "squad-bert-large", "wikipedia-bert"),
    *("an4-lstm", "chars", "wikitext2-small-gpt", "squad-minilm"),
}


def test_every_job_has_a_preset() -> None:
    assert set(PRESETS) == OF_THE_PAPERS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_what_exists(name: str) -> None:
    preset = PRESETS[name]
    assert preset.data in DATASETS
    assert preset.model in MODELS
    assert preset.about
    assert "\n" not in preset.about


def read_table() -> dict[str, list[str]]:
    """The cells of each preset's row in the docs."""
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", page.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in reversed(rows)}


@pytest.mark.parametrize("name", PRESETS)
def test_the_docs_say_what_the_preset_does(name: str) -> None:
    preset = PRESETS[name]
    _, model, _, batch, optimizer, _, epochs, origin = read_table()[name]
    training = preset.training
    rate = f"{training.lr:g}" + (" x W" if training.lr_scaling == "linear" else "")
    assert model.startswith(f"`{preset.model}`")
    assert batch == str(training.batch_size)
    assert re.match(rf"{training.optimizer} {rate}(,|$)", optimizer, re.IGNORECASE)
    assert ("clip" in optimizer) == (training.clip_norm is not None)
    assert ("decay" in optimizer) == (training.weight_decay > 0)
    assert epochs == str(training.epochs)
    assert origin.split("'")[0] in preset.about


def test_every_model_is_in_a_preset_or_an_alternative() -> None:
    assert set(MODELS) - {preset.model for preset in PRESETS.values()} == {"mlp"}


@pytest.mark.parametrize("name", PRESETS)
def test_tiny_and_synthetic_learns_and_is_measured(name: str) -> None:
    """Data and model fit: a forward and backward pass on what the loop would deal, then a measurement."""
    task = find_task(name)
    if MODELS[PRESETS[name].model].split(":")[0].endswith(("gpt2", "bert", "vit")):
        pytest.importorskip("transformers")
    data = task.load(DataOptions(synthetic=True, tiny=True))
    torch.manual_seed(0)
    model = task.build(data.kind, True)
    size = min(8, task.training.batch_size)
    places = data.train.deal(seed=0, epoch=0, rank=0, world=2, batch_size=size)
    batch = data.train.batch(places[0], torch.Generator().manual_seed(0))
    loss, _ = data.kind.loss(model, batch, None)
    loss.backward()
    assert loss.isfinite()
    model.eval()
    shares = data.test.deal_test(rank=0, world=2, batch_size=size)
    with torch.no_grad():
        totals, _ = data.kind.measure(model, data.test.batch(shares[0], None), None)
    metrics = data.kind.summarise({n: (float(a), float(b)) for n, (a, b) in totals.items()})
    assert metrics[data.kind.headline] >= 0
