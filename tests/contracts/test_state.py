"""Contract 4: state is portable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import Cluster
from tests.logs import catch_warnings_of
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.auto.steering import FORGOTTEN

POLICY = [tw.rule("3.*", method=tw.TopK(density=0.1)), tw.rule("0.*", dense=True)]


def build(adapter: str, method: Any = None, **options: Any) -> tuple:
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    module, optimizer, handle = make(
        adapter, model, optimizer, method or tw.ADTopK(density=0.05), policy=POLICY, **options
    )
    return model, module, optimizer, handle


def residuals(handle: tw.Handle) -> dict[str, Tensor]:
    return {row.info.name: handle.residual(row.info.name) for row in handle.plan() if not row.dense}


def resume_job(
    rank: int, world: int, adapter: str, folder: str, bucket_kb: float, method: Any = None
) -> bool:
    """Whether training, stopping and resuming gives the bits of training through."""
    data = list(batches(rank, 8))
    model, module, optimizer, handle = build(adapter, method, deterministic=True)
    train(module, optimizer, iter(data[:4]))
    path = Path(folder) / f"{rank}.pt"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "handle": handle.state_dict(),
    }
    torch.save(state, path)
    train(module, optimizer, iter(data[4:]))
    through, held = fingerprint(model), residuals(handle)
    handle.close()

    model, module, optimizer, handle = build(
        adapter, method, deterministic=True, bucket_kb=bucket_kb
    )
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["handle"])
    assert handle.stats().steps == 4
    train(module, optimizer, iter(data[4:]))
    resumed = residuals(handle)
    handle.close()
    same = all(torch.equal(held[name], resumed[name]) for name in held)
    return same and fingerprint(model) == through


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("bucket_kb", [20.0, 4.0], ids=["same buckets", "other buckets"])
def test_resume_is_bit_exact_when_deterministic(pools, tmp_path, adapter, bucket_kb):
    assert all(pools(3).run(resume_job, adapter, str(tmp_path), bucket_kb))


@pytest.mark.parametrize(
    "method",
    [tw.PowerSGD(rank=2), tw.ACPSGD(rank=2), tw.Quantized(bits=4, rounding="stochastic")],
    ids=lambda method: type(method).__name__,
)
def test_resume_of_other_methods_is_bit_exact_with_other_buckets(pools, tmp_path, method):
    assert all(pools(3).run(resume_job, "optimizer", str(tmp_path), 4.0, method))


def save_job(rank: int, world: int, adapter: str, folder: str) -> None:
    _, module, optimizer, handle = build(adapter)
    states = sorted(Path(folder).glob("rank*.pt"))
    if states:
        handle.load_state_dict(
            [torch.load(path, weights_only=True) for path in states], on_world_change="mean"
        )
    train(module, optimizer, batches(rank, 3))
    dist.barrier()
    for path in states:
        path.unlink(missing_ok=True)
    dist.barrier()
    torch.save(handle.state_dict(), Path(folder) / f"rank{rank}.pt")
    handle.close()


def change_world_job(rank: int, world: int, adapter: str, folder: str) -> None:
    states = [torch.load(path, weights_only=True) for path in sorted(Path(folder).glob("rank*.pt"))]
    saved = len(states)
    _, module, optimizer, handle = build(adapter)
    with pytest.raises(tw.UsageError, match=f"saved with {saved} ranks and there are {world}"):
        handle.load_state_dict(states)
    with pytest.raises(tw.UsageError, match="needs the states of all"):
        handle.load_state_dict(states[:-1], on_world_change="mean")
    handle.load_state_dict(states, on_world_change="mean")
    for name, held in residuals(handle).items():
        olds = [state["ranks"][f"rank{r}"]["memory"]["residual"] for r, state in enumerate(states)]
        mean = torch.stack([old[name].double() for old in olds]).mean(0)
        assert held.any() and torch.allclose(held.double(), mean, atol=1e-7)
    train(module, optimizer, batches(rank, 2))
    handle.load_state_dict(states, on_world_change="reset")
    assert not any(held.any() for held in residuals(handle).values())
    assert handle.stats().steps == states[0]["ranks"]["rank0"]["step"]
    train(module, optimizer, batches(rank, 2))
    handle.close()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_world_size_4_to_2_to_3_keeps_the_mean_or_starts_empty(pools, tmp_path, adapter):
    pools(4).run(save_job, adapter, str(tmp_path))
    pools(2).run(change_world_job, adapter, str(tmp_path))
    pools(2).run(save_job, adapter, str(tmp_path))
    pools(3).run(change_world_job, adapter, str(tmp_path))


def other_rank_job(rank: int, world: int) -> None:
    _, module, optimizer, handle = build("ddp")
    train(module, optimizer, batches(rank, 1))
    states: list[Any] = [None] * world
    dist.all_gather_object(states, handle.state_dict())
    held = handle.residual("6.weight")
    with pytest.raises(tw.UsageError, match="each rank must load its own"):
        handle.load_state_dict(states[(rank + 1) % world])
    content = states[rank]["ranks"][f"rank{rank}"]
    stranger = {**content, "steps": {**content["steps"], "nobody.weight": 3}}
    with pytest.raises(tw.UsageError, match=r"'nobody\.weight', which this model does not have"):
        handle.load_state_dict({**states[rank], "ranks": {f"rank{rank}": stranger}})
    content["memory"]["residual"]["6.weight"] = torch.ones(2, 2)
    with pytest.raises(tw.UsageError, match=r"'6.weight' has shape \[2, 2\]"):
        handle.load_state_dict(states[rank])
    with pytest.raises(tw.UsageError, match="version"):
        handle.load_state_dict({"version": 99})
    assert torch.equal(handle.residual("6.weight"), held), "a refused state changed something"
    handle.close()


def test_state_of_another_rank_or_model_is_refused_and_changes_nothing(pools):
    pools(2).run(other_rank_job)


def distributed_save_job(rank: int, world: int, adapter: str, folder: str) -> dict[str, Tensor]:
    _, module, optimizer, handle = build(adapter)
    train(module, optimizer, batches(rank, 3))
    held = residuals(handle)
    dcp.save({"thinwire": handle, "epoch": 7}, checkpoint_id=folder)
    train(module, optimizer, batches(rank, 2))
    dcp.load({"thinwire": handle}, checkpoint_id=folder)
    assert all(torch.equal(handle.residual(name), held[name]) for name in held)
    assert handle.stats().steps == 3
    _, _, _, fresh = build(adapter)
    fresh.load_checkpoint(folder)
    assert all(torch.equal(fresh.residual(name), held[name]) for name in held)
    assert fresh.state_dict()["ranks"][f"rank{fresh.rank}"]["steps"]["6.weight"] == 3
    fresh.close()
    handle.close()
    return {name: values.numpy() for name, values in held.items()}


def distributed_load_job(
    rank: int, world: int, adapter: str, folder: str, means: dict[str, Any]
) -> None:
    _, module, optimizer, handle = build(adapter)
    with pytest.raises(tw.UsageError, match="on_world_change"):
        handle.load_checkpoint(folder)
    handle.load_checkpoint(folder, on_world_change="mean")
    for name, mean in means.items():
        assert torch.allclose(handle.residual(name).double(), torch.as_tensor(mean), atol=1e-7)
    handle.load_checkpoint(folder, on_world_change="reset")
    assert not any(held.any() for held in residuals(handle).values())
    assert handle.stats().steps == 3
    train(module, optimizer, batches(rank, 2))
    handle.close()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_distributed_checkpoint_keeps_every_ranks_own_residual(pools, tmp_path, adapter):
    helds = pools(3).run(distributed_save_job, adapter, str(tmp_path))
    assert any((helds[0][name] != helds[1][name]).any() for name in helds[0])
    means = {name: sum(h[name].astype("float64") for h in helds) / 3 for name in helds[0]}
    pools(2).run(distributed_load_job, adapter, str(tmp_path), means)


def nothing_held_job(rank: int, world: int) -> None:
    """One rank holds nothing back of parameters that are dense now; all send alike."""
    _, module, optimizer, handle = build("ddp")
    train(module, optimizer, batches(rank, 2))
    state = handle.state_dict()
    handle.close()
    if rank == 0:
        for held in state["ranks"]["rank0"]["memory"]["residual"].values():
            held.zero_()
    model, module, optimizer, fresh = build("ddp", tw.Dense())
    fresh.load_state_dict(state)
    train(module, optimizer, batches(rank, 1))
    assert not fresh.residual("6.weight").any()
    prints: list[bytes] = [b""] * world
    dist.all_gather_object(prints, fingerprint(model))
    assert len(set(prints)) == 1
    fresh.close()


def test_a_rank_that_holds_nothing_back_sends_as_the_others_do(pools):
    pools(2).run(nothing_held_job)


def pending_flush_job(rank: int, world: int, folder: str) -> None:
    """Saved between switch and the next step, the flush still happens after the restart."""
    _, module, optimizer, handle = build("ddp")
    train(module, optimizer, batches(rank, 2))
    held = handle.residual("6.weight")
    handle.switch(tw.Dense(), policy=[])
    state = handle.state_dict()
    handle.close()
    model, module, optimizer, fresh = build("ddp", tw.Dense())
    fresh.load_state_dict(state)
    assert torch.equal(fresh.residual("6.weight"), held)
    train(module, optimizer, batches(rank, 1))
    assert not fresh.residual("6.weight").any()
    sums = held.clone()
    dist.all_reduce(sums)
    local = torch.zeros_like(held)
    plain = make_cnn()
    (images, labels), *_ = batches(rank, 1)
    torch.nn.functional.cross_entropy(plain(images), labels).backward()
    local += plain[6].weight.grad
    dist.all_reduce(local)
    torch.testing.assert_close(model[6].weight.grad, (sums + local) / world, atol=1e-6, rtol=1e-5)
    fresh.close()


def test_residual_of_a_parameter_that_is_dense_now_is_sent_not_dropped(pools, tmp_path):
    pools(2).run(pending_flush_job, str(tmp_path))


@pytest.mark.parametrize(
    "saved, loading",
    [
        (tw.ACPSGD(rank=2, dense_fallback=False), tw.ADTopK(interleave=2, threshold=True)),
        (tw.OkTopK(thresholds="published"), tw.ADTopK(interleave=2, threshold=True)),
        (tw.Quantized(), tw.ADTopK(interleave=2, threshold=True)),
        (tw.ADTopK(interleave=2, threshold=True), tw.SIDCo(adapt=True)),
        (tw.ADTopK(interleave=2, threshold=True), tw.PowerSGD(rank=2, dense_fallback=False)),
    ],
    ids=lambda method: type(method).__name__,
)
def test_state_of_another_method_gives_what_it_held_back(saved, loading):
    source, target = Cluster(2, saved), Cluster(2, loading)
    for seed in range(3):
        source.step(source.random(seed))
    held = [source.residuals(rank)["linear"] for rank in range(2)]
    for ours, theirs in zip(target.reducers, source.reducers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    assert held[0].any()
    for rank in range(2):
        assert torch.equal(target.residuals(rank)["linear"], held[rank])
    target.step(target.random(3))


def distributed_adam_job(rank: int, world: int, folder: str) -> None:
    """A new handle begins dense: it reads what was held back, and since when, by `load_checkpoint` alone."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, tw.Handle]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        method = tw.AdamScale(method=tw.TopK(density=0.05, dense_fallback=False), start=2)
        return ddp, optimizer, tw.attach(ddp, method, optimizer=optimizer)

    def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        ddp(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    ddp, optimizer, handle = make()
    torch.manual_seed(rank)
    for _ in range(5):
        step(ddp, optimizer)
    held, state = residuals(handle), optimizer.state_dict()
    assert held["weight"].any()
    dcp.save({"thinwire": handle}, checkpoint_id=folder)
    handle.close()
    ddp, optimizer, handle = make()
    optimizer.load_state_dict(state)
    handle.load_checkpoint(folder)
    assert all(torch.equal(handle.residual(name), held[name]) for name in held)
    taken = handle.state_dict()["ranks"][f"rank{rank}"]["takeover"]
    assert (taken["learned"], taken["since"]) == (2, 2)
    step(ddp, optimizer)
    handle.close()
    _, optimizer, handle = make()
    optimizer.load_state_dict(state)
    with catch_warnings_of("thinwire.auto.steering") as said:
        dcp.load({"thinwire": handle}, checkpoint_id=folder)
    assert said == [FORGOTTEN]
    handle.close()


def test_a_distributed_checkpoint_in_adams_scale(pools, tmp_path):
    pools(2).run(distributed_adam_job, str(tmp_path))


def test_ranks_that_hold_nothing_back_send_it_with_the_others():
    """A rank without a gradient for a parameter, such as an expert, has a residual of zeros."""
    ours = Cluster(2, tw.TopK(density=0.1, dense_fallback=False))
    gradients = ours.random(0)
    gradients[1]["linear"].zero_()
    ours.step(gradients)
    pending = [ours.residuals(rank)["linear"] for rank in range(2)]
    theirs = Cluster(2, tw.Dense())
    for rank in range(2):
        theirs.reducers[rank].load_state_dict(ours.reducers[rank].state_dict())
    gradients = theirs.random(1)
    updates = theirs.step(gradients)
    sent = (pending[0] + pending[1] + gradients[0]["linear"] + gradients[1]["linear"]) / 2
    torch.testing.assert_close(updates[0]["linear"], sent)
    assert all(torch.equal(updates[0][name], updates[1][name]) for name in updates[0])
