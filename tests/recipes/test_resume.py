"""A run that was stopped in mid-epoch goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from thinwire.methods.base import Method
from thinwire.recipes.checkpoints import KEPT, Checkpoints
from thinwire.recipes.config import Training
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.loop import Run, Trainer
from thinwire.recipes.parallel import ProcessWorkers
from thinwire.recipes.tasks import find_task
from thinwire.tools.metrics import NoMetrics

TINY = DataOptions(synthetic=True, tiny=True)
CPU = torch.device("cpu")
LAST = 9
STOPPED_AT = 4

CASES: dict[str, tuple[str, Method, Training]] = {
    "cnn": (
        "cifar10-resnet20",
        tw.DGC(density=0.05, dense_fallback=False),
        Training(
            epochs=3, batch_size=4, lr=0.05, weight_decay=1e-4, schedule="plateau", patience=1
        ),
    ),
    "channels_last": (
        "cifar10-resnet20",
        tw.ADTopK(density=0.05, dense_fallback=False),
        Training(
            epochs=3, batch_size=4, lr=0.05, weight_decay=1e-4, channels_last=True, precision="bf16"
        ),
    ),
    "transformer": (
        "wikitext2-transformer",
        tw.ADTopK(density=0.05, interleave=2, dense_fallback=False),
        Training(
            epochs=3,
            batch_size=2,
            accumulate=2,
            lr=0.01,
            optimizer="adamw",
            weight_decay=0.1,
            decay_norms=False,
            clip_norm=1.0,
            precision="bf16",
        ),
    ),
    "lstm": (
        "wikitext2-lstm",
        tw.TopK(density=0.05, dense_fallback=False),
        Training(epochs=3, batch_size=2, lr=0.1, clip_norm=0.25),
    ),
}


def make_trainer(case: str, folder: Path, stop_after: int) -> Trainer:
    task_name, method, training = CASES[case]
    task = find_task(task_name)
    data = task.load(TINY)
    workers = ProcessWorkers(CPU)
    run = Run(
        label=case,
        method_name=case,
        method=method,
        training=training,
        stop_after=stop_after,
        deterministic=True,
    )
    torch.manual_seed(training.seed)
    model = task.build(data.kind, True)
    return Trainer(run, model, data, workers, NoMetrics(), Checkpoints(folder, workers, every=2))


def finish(trainer: Trainer) -> dict[str, Tensor]:
    row = trainer.train()
    assert row.replicas_identical
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.replica.close()
    dist.barrier()
    return state


def train_at_once_and_in_two(
    rank: int, world: int, case: str, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    whole = finish(make_trainer(case, Path(folder) / "whole", LAST))
    parts = Path(folder) / "parts"
    finish(make_trainer(case, parts, STOPPED_AT))
    resumed = make_trainer(case, parts, LAST)
    state = resumed.checkpoints.load_latest()
    assert state is not None
    resumed.load_state_dict(state)
    number = resumed.position.number
    return whole, finish(resumed), number


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_same_bits(case: str, pools, tmp_path: Path) -> None:
    for whole, resumed, number in pools(2).run(train_at_once_and_in_two, case, str(tmp_path)):
        assert number > 0, "it must have stopped in the middle of an epoch"
        assert whole.keys() == resumed.keys()
        different = [name for name in whole if not torch.equal(whole[name], resumed[name])]
        assert different == []


def files(rank: int, world: int, folder: str) -> None:
    finish(make_trainer("cnn", Path(folder), LAST))


def test_the_last_few_and_the_best_are_kept(pools, tmp_path: Path) -> None:
    pools(2).run(files, str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if "process1" in name] == [
        "best-process1.pt",
        "step00000006-process1.pt",
        "step00000008-process1.pt",
        "step00000009-process1.pt",
    ]
    assert len(names) == 2 * (KEPT + 1)
