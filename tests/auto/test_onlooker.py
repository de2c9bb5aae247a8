"""A handle whose method is fixed measures when it is asked to, tells what would be better, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.auto.linear import LinearJob
from tests.auto.workers import Model
from tests.pool import Pool
from thinwire.errors import UsageError


def onlooking(rank: int, world: int) -> dict[str, Any]:
    job, plain = (LinearJob(rank, tw.Quantized(bits=1), adam=True) for _ in range(2))
    before = str(job.handle.advise())
    job.handle.measure(3)
    for _ in range(7):
        job.step()
        plain.step()
    meanwhile = str(job.handle.advise())
    job.step()
    plain.step()
    advice = job.handle.advise()
    hooks = len(job.handle.reducer.before_step), job.handle.reducer.on_ready
    job.handle.switch(tw.Dense())
    return {
        "before": before,
        "meanwhile": meanwhile,
        "advice": str(advice),
        "rows": {row.name: row.verdict for row in advice.rows},
        "settled": advice.settled,
        "unchanged": torch.equal(job.weights(), plain.weights()),
        "hooks": hooks,
        "after": str(job.handle.advise()),
    }


def test_a_fixed_method_is_told_what_would_be_better(pools: Callable[[int], Pool]) -> None:
    results = pools(2).run(onlooking)
    first = results[0]
    assert "call handle.measure()" in first["before"] == first["after"]
    assert "Measuring: step 7 of 7" in first["meanwhile"]
    assert first["settled"] and "in force" in first["advice"] and "(measured)" in first["advice"]
    # One bit is not safe with Adam: it has a row because it is in force, and what is safe is advised.
    assert first["rows"]["int1"] == "in force"
    assert set(first["rows"]) >= {"dense", "int8", "int4"} and "int2" not in first["rows"]
    assert results[1]["advice"] == first["advice"]
    assert first["unchanged"] and first["hooks"] == (1, None)


def looking_on_at_momentum(rank: int, world: int) -> set[str]:
    job = LinearJob(rank, tw.DGC(density=0.05))
    job.handle.measure(3, quality="balanced")
    for _ in range(8):
        job.step()
    return {row.name for row in job.handle.advise().rows}


def test_sgd_whose_momentum_was_taken_over_is_sgd_with_momentum(
    pools: Callable[[int], Pool],
) -> None:
    for names in pools(2).run(looking_on_at_momentum):
        assert names >= {"dense", "topk-1%", "adtopk-1%"}


def test_what_cannot_be_measured_is_said() -> None:
    simulation = tw.simulate(Model(8), workers=2, method=tw.TopK())
    with pytest.raises(UsageError, match="simulated workers have none"):
        simulation.handles[0].measure()
