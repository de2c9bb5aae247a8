"""Recipes with simulated workers learn what they learn with real ones, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.loop import Run, Trainer
from thinwire.recipes.parallel import ProcessWorkers, Workers
from thinwire.recipes.simulated import SimulatedWorkers
from thinwire.recipes.tasks import find_task
from thinwire.tools.metrics import NoMetrics

CPU = torch.device("cpu")
METHODS = {
    "adtopk": tw.ADTopK(density=0.05, dense_fallback=False),
    "dgc": tw.DGC(density=0.05),
    "oktopk": tw.OkTopK(density=0.05, dense_fallback=False),
}
JOBS = {
    "cifar10-resnet20": {"batch_size": 4, "accumulate": 2},
    "cifar10-vgg16": {"batch_size": 4, "channels_last": True, "precision": "bf16"},
    "wikitext2-lstm": {"batch_size": 4, "optimizer": "sgd", "lr": 1.0},
    "wikitext2-transformer": {"batch_size": 4, "precision": "bf16", "optimizer": "sgd"},
}


def train(task_name: str, method: str, workers: Workers, steps: int) -> dict[str, Tensor]:
    task = find_task(task_name)
    data = task.load(DataOptions(synthetic=True, tiny=True))
    training = replace(task.training, epochs=2, **JOBS[task_name])
    torch.manual_seed(0)
    model = task.build(data.kind, True)
    run = Run(
        label=method,
        method_name=method,
        method=METHODS[method],
        training=training,
        deterministic=True,
        stop_after=steps,
    )
    trainer = Trainer(run, model, data, workers, NoMetrics(), Checkpoints(Path(), workers, None))
    row = trainer.train()
    trainer.replica.close()
    assert row.steps == steps and row.replicas_identical
    return {
        **trainer.model.state_dict(),
        "score": torch.tensor(row.score),
        "sent": torch.tensor(row.wire_bytes_per_step),
    }


def real_job(rank: int, world: int, task_name: str, method: str, steps: int) -> dict[str, Tensor]:
    return train(task_name, method, ProcessWorkers(CPU), steps)


@pytest.mark.parametrize(
    ("task_name", "method"),
    [
        ("cifar10-resnet20", "adtopk"),
        ("cifar10-resnet20", "dgc"),
        ("cifar10-vgg16", "adtopk"),
        ("wikitext2-lstm", "adtopk"),
        ("wikitext2-transformer", "oktopk"),
    ],
)
def test_a_recipe_is_the_same_with_simulated_workers(pools, task_name, method):
    real = pools(2).run(real_job, task_name, method, 6)[0]
    simulated = train(task_name, method, SimulatedWorkers(2, CPU), 6)
    # The test set is shared out differently, which changes the order in which losses are added.
    torch.testing.assert_close(simulated.pop("score"), real.pop("score"))
    for name, value in real.items():
        assert torch.equal(simulated[name], value), name
