from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from tests.recipes.own_tasks import TINY
from thinwire.errors import UsageError
from thinwire.methods.base import Method
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.config import Training
from thinwire.recipes.evaluation import evaluate
from thinwire.recipes.examples import DataOptions, TensorExamples, count_steps
from thinwire.recipes.loop import Run, Trainer, are_replicas_identical, asked_density
from thinwire.recipes.parallel import ProcessWorkers
from thinwire.recipes.precision import Precision
from thinwire.tools.metrics import NoMetrics
from thinwire.tools.results import Row

CPU = torch.device("cpu")
DENSE = tw.Dense()
DATA = TINY.load(DataOptions())


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return TINY.build(DATA.kind, False)


def test_an_epoch_is_dealt_out_without_overlap() -> None:
    examples = TensorExamples((torch.arange(50),))

    def deal(epoch: int) -> list[int]:
        setting = {"seed": 0, "epoch": epoch, "world": 3, "batch_size": 4}
        return [int(i) for r in range(3) for part in examples.deal(rank=r, **setting) for i in part]

    first, again, second = deal(0), deal(0), deal(1)
    assert len(first) == len(set(first)) == 48
    assert first == again
    assert first != second


def score_alone_and_together(rank: int, world: int) -> tuple[float, float]:
    model = build()
    images, labels = DATA.test.batch(torch.arange(len(DATA.test)), None)
    alone = (model(images).argmax(1) == labels).double().mean().item()
    workers = ProcessWorkers(CPU)
    together = evaluate(model, DATA, workers, Precision("fp32", CPU), batch_size=16)
    return together["top1"], alone


def test_the_test_score_counts_every_example_once(pools) -> None:
    for together, alone in pools(4).run(score_alone_and_together):
        assert together == pytest.approx(alone, abs=1e-6)


def notice_one_bit(rank: int, world: int) -> tuple[bool, bool]:
    model, workers = build(), ProcessWorkers(CPU)
    before = are_replicas_identical(model, workers)
    if rank == 1:
        with torch.no_grad():
            weight = model[0].weight
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))
    return before, are_replicas_identical(model, workers)


def test_replicas_that_differ_in_one_bit_are_noticed(pools) -> None:
    assert pools(3).run(notice_one_bit) == [(True, False)] * 3


def train(name: str, method: Method, training: Training) -> Row:
    workers = ProcessWorkers(CPU)
    run = Run(label=name, method_name=name, method=method, training=training)
    trainer = Trainer(run, build(), DATA, workers, NoMetrics(), Checkpoints(Path(), workers, None))
    row = trainer.train()
    trainer.replica.close()
    return row


def train_twice(rank: int, world: int) -> list[Row]:
    methods = {"dense": tw.Dense(), "adtopk": tw.ADTopK(density=0.1, dense_fallback=False)}
    rows = [train(name, method, TINY.training) for name, method in methods.items()]
    dist.barrier()
    return rows


def test_a_row_holds_what_was_measured(pools) -> None:
    for dense, sparse in pools(3).run(train_twice):
        assert dense.asked_density is None
        assert dense.density == 1.0
        assert dense.ratio == pytest.approx(1.0, abs=0.02)
        assert sparse.asked_density == 0.1
        assert 0.05 < sparse.density < 0.4
        assert sparse.ratio > 2
        for row in (dense, sparse):
            assert row.steps == 2 * (150 // 24)
            assert row.replicas_identical
            assert 0 <= row.score <= 1
            assert row.ms_per_step > 0


def train_short(training: Training, method: Method = DENSE, steps: int = 3) -> dict[str, Tensor]:
    """Parameters after a few steps."""
    workers = ProcessWorkers(CPU)
    run = Run(label="x", method_name="x", method=method, training=training, stop_after=steps)
    model = build()
    trainer = Trainer(run, model, DATA, workers, NoMetrics(), Checkpoints(Path(), workers, None))
    row = trainer.train()
    assert row.replicas_identical
    assert row.exposed_ms_per_step is not None
    trainer.replica.close()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


PLAIN = Training(epochs=1, batch_size=8, lr=0.1, schedule="constant")


def accumulate_and_clip(rank: int, world: int) -> dict[str, float]:
    start = dict(build().state_dict())
    whole = train_short(PLAIN)
    in_parts = train_short(replace(PLAIN, batch_size=4, accumulate=2))
    sgd = replace(PLAIN, momentum=0.0)
    clipped = train_short(replace(sgd, clip_norm=0.01), steps=1)
    sparse = tw.TopK(density=0.1, dense_fallback=False)
    sparse_clipped = train_short(replace(sgd, clip_norm=0.01), sparse, steps=1)
    dist.barrier()
    return {
        "accumulated": distance(whole, in_parts),
        "moved": distance(start, whole),
        "clipped": distance(start, clipped),
        "sparse clipped": distance(start, sparse_clipped),
    }


def test_micro_batches_add_up_and_the_average_is_clipped(pools) -> None:
    for found in pools(2).run(accumulate_and_clip):
        assert found["accumulated"] < 1e-6 < found["moved"]
        # One step of SGD moves by the rate times the norm of what is left after clipping.
        assert found["clipped"] == pytest.approx(0.1 * 0.01, rel=1e-3)
        assert found["sparse clipped"] == pytest.approx(0.1 * 0.01, rel=1e-3)


def narrow(rank: int, world: int) -> dict[str, float]:
    wide = train_short(PLAIN)
    sparse = tw.TopK(density=0.9, dense_fallback=False, values="fp32")
    found = {
        name: distance(wide, train_short(replace(PLAIN, precision=name), method))
        for name, method in (("bf16", DENSE), ("fp16", DENSE), ("fp16", sparse))
    }
    found["fp16 moved"] = distance(
        dict(build().state_dict()), train_short(replace(PLAIN, precision="fp16"))
    )
    adam = replace(PLAIN, optimizer="adamw", lr=1e-3, weight_decay=0.1, decay_norms=False)
    found["adamw"] = distance(wide, train_short(adam))
    dist.barrier()
    return found


def test_every_precision_and_optimizer_learns(pools) -> None:
    for found in pools(2).run(narrow):
        assert 0 < found["bf16"] < 0.05
        assert 0 < found["fp16"] < 0.05
        assert found["adamw"] > 0
        assert found["fp16 moved"] > 0.01


def test_too_many_workers_for_the_data_is_one_sentence() -> None:
    assert count_steps(100, 3, 8) == 4
    with pytest.raises(
        UsageError, match=r"batch_size is 8 on 13 workers; together .* 100 training"
    ):
        count_steps(100, 13, 8)


def test_the_density_of_an_own_selection_is_told():
    def largest(rows: torch.Tensor, k: int) -> torch.Tensor:
        return rows.abs().topk(k, 1).indices

    assert asked_density(tw.Compose(select=tw.selector(largest, density=0.02))) == 0.02


def test_the_density_in_adams_scale_is_that_of_the_method_inside():
    assert asked_density(tw.AdamScale(method=tw.TopK(density=0.01))) == 0.01
    assert asked_density(tw.AdamScale(method=tw.Quantized(bits=1))) is None
