"""Contract 2 when a backward fails: what its buckets had sent by then returns, and the next backward is as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import Cluster, same_bits, sparse
from thinwire.layout import Bucket

WORLD = 2
FIRST, LAST = "0.weight", "2.weight"
Named = dict[str, Tensor]


class Stop(RuntimeError):
    """What a backward fails with."""


def stop(gradient: Tensor) -> None:
    raise Stop


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Identity(), nn.Linear(64, 32))


def draw(rank: int, seed: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * seed + rank))


def gradients_of(model: nn.Module, inputs: Tensor) -> Named:
    """This rank's own."""
    found = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True))


def fail(module: nn.Module, model: nn.Sequential, inputs: Tensor, *, late: bool) -> None:
    """A backward that fails between the two layers, or when every gradient is there."""
    inputs = 1 * inputs.clone().requires_grad_()
    watched = [inputs]
    remover = model[1].register_forward_hook(lambda _, given, output: watched.append(output))
    loss = module(inputs).square().mean()
    remover.remove()
    watched[0 if late else 1].register_hook(stop)
    with pytest.raises(Stop):
        loss.backward()


def residuals(handle: tw.Handle) -> Named:
    return {name: handle.residual(name) for name in (FIRST, LAST)}


def failed_job(rank: int, world: int, adapter: str, skippable: bool, late: bool) -> list[Named]:
    """[held before, the failed gradient, held after it, the next gradient, its update, held at the end]."""
    model = two_layers()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"bucket_kb": 0.1, "skippable": skippable}
    module, optimizer, handle = make(adapter, model, plain, sparse("fp32"), **options)
    # Every bucket leaves at once.
    handle.reducer.coalesce_bytes = 0
    for seed in range(3):
        optimizer.zero_grad()
        module(draw(rank, seed)).square().mean().backward()
        optimizer.step()
    before, failed = residuals(handle), gradients_of(model, draw(rank, 10))
    optimizer.zero_grad()
    fail(module, model, draw(rank, 10), late=late)
    # Whoever catches the error may save first.
    saved = handle.state_dict()["ranks"][f"rank{rank}"]["memory"]["residual"]
    if adapter == "ddp":
        # Torch refuses every further backward of this one.
        del module
        module = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        handle.regroup(model=module)
    optimizer.zero_grad()
    good = gradients_of(model, draw(rank, 11))
    module(draw(rank, 11)).square().mean().backward()
    update = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    after = residuals(handle)
    handle.close()
    return [before, failed, saved, good, update, after]


@pytest.mark.parametrize("late", [False, True], ids=["between", "late"])
@pytest.mark.parametrize("skippable", [True, False], ids=["skippable", "kept"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_backward_that_fails_loses_nothing(pools, adapter, skippable, late):
    ranks = pools(WORLD).run(failed_job, adapter, skippable, late)
    for name in (FIRST, LAST):
        for before, failed, saved, *_ in ranks:
            # Without a second copy of memory what was handed in stays there.
            kept = not skippable and (late or name == LAST)
            expected = before[name] + failed[name] if kept else before[name]
            assert same_bits(saved[name], expected)
        held, sent, left = (sum(one[index][name] for one in ranks) for index in (2, 3, 5))
        for *_, update, _ in ranks:
            torch.testing.assert_close(WORLD * update[name] + left, held + sent)


def hand_in(cluster: Cluster) -> None:
    """The first bucket of a backward."""
    for rank, layout in enumerate(cluster.layouts_of(cluster.buckets[0])):
        cluster.reducers[rank].reduce(Bucket(layout, torch.ones(layout.numel)))


def test_a_backward_that_was_left_before_its_end_is_taken_back():
    """All its buckets have arrived, but nobody said that it came to its end."""
    left, undisturbed = (Cluster(WORLD, sparse(), restorable=True) for _ in range(2))
    for cluster in (left, undisturbed):
        cluster.step(cluster.random(0))
    hand_in(left)
    left.ranks.run()
    mine, theirs = (cluster.step(cluster.random(1)) for cluster in (left, undisturbed))
    for rank in range(WORLD):
        assert all(same_bits(mine[rank][name], theirs[rank][name]) for name in mine[rank])


def test_what_has_ended_stays_when_the_next_backward_is_abandoned():
    """Its first bucket may wait for others, so that its step has not begun."""
    cluster = Cluster(1, sparse())
    cluster.buckets = [["linear", "bias"], ["conv"], ["head", "scalar"]]
    (reducer,) = cluster.reducers
    cluster.step(cluster.random(0))
    after = cluster.residuals(0)
    reducer.merge_bytes = 1 << 30
    hand_in(cluster)
    reducer.abandon()
    assert all(same_bits(cluster.residuals(0)[name], after[name]) for name in after)
