from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.layout import describe_module
from thinwire.plan.layerwise import water_level
from thinwire.plan.policy import make_plan


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1000, 50), nn.Linear(50, 40), nn.Linear(40, 8, bias=False))


def test_the_level_meets_the_budget_exactly():
    rows = [(50, 1000), (40, 50), (8, 40)]
    level = water_level(rows, 600.0)
    assert sum(count * min(level, length) for count, length in rows) == pytest.approx(600.0)


def test_rows_get_equal_shares_and_full_layers_go_dense():
    rows = [(10, 1000), (10, 4)]
    assert water_level(rows, 140.0) == 10.0
    assert water_level(rows, 1e9) == 1000.0
    assert water_level(rows, 0.001) == 1.0


def test_the_policy_spends_the_budget_of_a_common_density():
    network = model()
    rules = tw.layerwise_density(network, 0.02)
    infos = [info for _, info in describe_module(network).values()]
    plan = make_plan(infos, tw.ADTopK(dense_fallback=False), rules, world=4)
    per_row = {
        name: entry.method.selector().rows(entry.info.slot(0), None).keep
        for name, entry in plan.items()
        if not entry.dense
    }
    matrices = [info for info in infos if len(info.shape) == 2]
    sent = sum(
        plan[i.name].method.selector().rows(i.slot(0), None).entries
        if not plan[i.name].dense
        else i.numel
        for i in matrices
    )
    budget = 0.02 * sum(i.numel for i in matrices)
    assert 0.9 * budget <= sent <= 1.05 * budget
    assert len(set(per_row.values())) == 1


def test_names_with_glob_letters_match_themselves_only():
    network = nn.ModuleDict({"a[0]": nn.Linear(64, 64), "a0": nn.Linear(64, 64)})
    rules = tw.layerwise_density(network, 0.1)
    infos = {info.name: info for _, info in describe_module(network).values()}
    first = next(r for r in rules if r.matches(infos["a[0].weight"]))
    assert not first.matches(infos["a0.weight"])


@pytest.mark.parametrize("density", [0, 2, float("nan"), "x"])
def test_a_bad_density_is_named(density):
    with pytest.raises(tw.UsageError, match="density is"):
        tw.layerwise_density(model(), density)


def test_it_trains_through_attach(pools):
    pools(2).run(attach_job)


def attach_job(rank: int, world: int) -> None:
    network = model()
    ddp = nn.parallel.DistributedDataParallel(network)
    handle = tw.attach(ddp, tw.ADTopK(), policy=tw.layerwise_density(network, 0.02))
    ddp(torch.randn(4, 1000)).sum().backward()
    assert 0 < handle.stats().density < 0.2
    handle.close()
