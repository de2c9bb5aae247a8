"""Every preset in its tiny form: three real optimisation steps on small data in its official format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lanes import mostly_slow, slow
from tests.models import fingerprint
from tests.recipes.data.official import NEED_TOKENIZERS, WRITERS
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.job import build_job
from thinwire.recipes.loop import Run, Trainer
from thinwire.recipes.parallel import ProcessWorkers
from thinwire.recipes.presets import PRESETS
from thinwire.tools.metrics import NoMetrics
from thinwire.tools.results import Row

OF_TRANSFORMERS = ("bert", "minilm", "gpt2", "vit-large")
STEPS = 3


def train(rank: int, world: int, name: str, folder: str) -> tuple[Row, bytes, bytes]:
    """The row of a short run, and the parameters before and after it."""
    settings: dict[str, Any] = {
        "task": {"name": name, "data_dir": folder, "tiny": True},
        "method": {"name": "adtopk", "density": 0.05, "dense_fallback": False},
        "training": {"batch_size": 4},
        "run": {"workers": world, "steps": STEPS},
    }
    job = build_job("train", settings, out=Path(folder))
    (cell,) = job.cells()
    task = job.choice.find()
    data = task.load(job.source)
    workers = ProcessWorkers(torch.device("cpu"))
    torch.manual_seed(cell.training.seed)
    model = task.build(data.kind, job.source.tiny)
    before = fingerprint(model)
    run = Run(
        label=name,
        method_name=cell.method,
        method=cell.build_method(steps_per_epoch=STEPS),
        training=cell.training,
        stop_after=job.running.steps,
    )
    trainer = Trainer(run, model, data, workers, NoMetrics(), Checkpoints(Path(), workers, None))
    row = trainer.train()
    trainer.replica.close()
    return row, before, fingerprint(model)


def prepare(name: str, folder: Path) -> None:
    """The preset's data on disk; skips what needs a package that is not there."""
    preset = PRESETS[name]
    if preset.model.startswith(OF_TRANSFORMERS):
        pytest.importorskip("transformers")
    if preset.data in NEED_TOKENIZERS:
        pytest.importorskip("tokenizers")
    if preset.data in WRITERS:
        WRITERS[preset.data](folder)


LIKE_OTHERS = {
    *("cifar100-vgg16", "cifar10-resnet110", "fashion-mnist", "imagenet-resnet152"),
    *("squad-bert-large", "squad-minilm", "wikitext103-gpt2", "wikitext103-gpt2-large"),
    "wikitext2-gpt2-large",
}
"""Presets whose parts are those of another one, larger or on data of the same kind."""


@pytest.mark.parametrize("name", mostly_slow(PRESETS, lambda name: name not in LIKE_OTHERS))
def test_alone(pools: Any, name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path)
    ((row, before, after),) = pools(1).run(train, name, str(tmp_path))
    assert row.steps == STEPS
    assert before != after
    assert all(math.isfinite(value) for value in row.metrics.values())
    assert row.score == row.metrics[row.metric]


@pytest.mark.parametrize(
    "name", [slow("cifar10-resnet20"), "wikitext2-lstm", slow("an4-lstm"), "squad-bert-base"]
)
def test_two_workers(pools: Any, name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path)
    (row, before, after), (other_row, _, other_after) = pools(2).run(train, name, str(tmp_path))
    assert before != after
    assert after == other_after
    assert row.replicas_identical
    assert row.metrics == other_row.metrics
    assert row.density < 0.5
    assert row.ratio > 1
