"""The contracts for compression in Adam's scale, with real workers and on virtual ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import Cluster, same_bits
from thinwire.memory.adam import AdamMomentum, AdamSettings
from thinwire.memory.refresh import Refresh

WORLD = 3
SHAPES = {"conv": (8, 4, 3, 3), "bias": (8,), "linear": (33, 40), "head": (10, 64)}
COMPRESSED = ("conv", "linear", "head")
ADAM = AdamSettings(0.9, 0.95, 1e-8, 10, 0)
NEVER_DENSE = {"density": 0.1, "dense_fallback": False}
SELECTING = {
    "TopK": tw.TopK(**NEVER_DENSE),
    "TopK, fp32": tw.TopK(values="fp32", **NEVER_DENSE),
    "TopK, int8": tw.TopK(values="int8", **NEVER_DENSE),
    "ADTopK": tw.ADTopK(**NEVER_DENSE),
    "ADTopK, interleaved": tw.ADTopK(interleave=2, threshold=True, **NEVER_DENSE),
    "DGC": tw.DGC(**NEVER_DENSE),
    "DGC, sampled": tw.DGC(sample_ratio=0.2, **NEVER_DENSE),
    "GaussianK": tw.GaussianK(**NEVER_DENSE),
}
QUANTISED = {
    "1 bit": tw.Quantized(bits=1, block=32, dense_fallback=False),
    "1 bit, sums in 8": tw.Quantized(bits=1, sum_bits=8, dense_fallback=False),
    "2 bits": tw.Quantized(bits=2, dense_fallback=False),
    "4 bits": tw.Quantized(bits=4, dense_fallback=False),
}
LOW_RANK = {
    "PowerSGD": tw.PowerSGD(rank=3, dense_fallback=False),
    "PowerSGD, bf16": tw.PowerSGD(rank=3, wire="bf16", dense_fallback=False),
    "ACP-SGD": tw.ACPSGD(rank=3, dense_fallback=False),
}
ALL = SELECTING | QUANTISED
MEMORIES = {
    "frozen": AdamMomentum(adam=ADAM),
    "limited": AdamMomentum(limit=0.5, adam=ADAM),
    "refreshed": AdamMomentum(Refresh(every=2), limit=3.0, floor=0.01, adam=ADAM),
    "bf16": AdamMomentum(storage="bf16", adam=ADAM),
}
WITHOUT_LIMIT = {
    "frozen": AdamMomentum(adam=ADAM),
    "refreshed": AdamMomentum(Refresh(every=2), floor=0.01, adam=ADAM),
}


def seeded(method: tw.Method, memory: AdamMomentum, world: int = WORLD, **options: Any) -> Cluster:
    """Ranks that have taken a second moment over: sizes that differ by orders of magnitude inside every tensor."""
    cluster = Cluster(world, method.in_scale(memory), shapes=SHAPES, **options)
    generator = torch.Generator().manual_seed(7)
    moments = {
        name: torch.randn(shape, generator=generator).mul(3).exp() for name, shape in SHAPES.items()
    }
    for reducer in cluster.reducers:
        for name in COMPRESSED:
            assert reducer.assignments.write_memory(name, "second_moment", moments[name])
    return cluster


def held(cluster: Cluster, rank: int, store: str) -> dict[str, torch.Tensor]:
    reducer = cluster.reducers[rank]
    reducer.settle()
    found = {name: reducer.assignments.held(name, store) for name in COMPRESSED}
    return {
        name: torch.zeros(SHAPES[name]) if values is None else values
        for name, values in found.items()
    }


@pytest.mark.parametrize("kind", ["frozen", "limited", "refreshed"])
@pytest.mark.parametrize("method", SELECTING.values(), ids=SELECTING)
def test_replicas_agree_and_nothing_is_lost(method: tw.Method, kind: str) -> None:
    """Accepted + residual = c bit for bit on every rank, and world x update = the sum of what was accepted."""
    cluster = seeded(method, MEMORIES[kind])
    for step in range(3):
        before = [held(cluster, rank, "residual") for rank in range(WORLD)]
        updates = cluster.step(cluster.random(step))
        accepted = [cluster.accepted(rank) for rank in range(WORLD)]
        for name in COMPRESSED:
            assert all(same_bits(update[name], updates[0][name]) for update in updates)
            for rank in range(WORLD):
                c = before[rank][name] + held(cluster, rank, "momentum")[name]
                assert torch.equal(accepted[rank][name] + held(cluster, rank, "residual")[name], c)
            total = sum(one[name].double() for one in accepted)
            lost = WORLD * updates[0][name].double() - total
            assert lost.abs().sum() <= 1e-6 * total.abs().sum()
        moments = [held(cluster, rank, "second_moment") for rank in range(WORLD)]
        for name in COMPRESSED:
            assert all(same_bits(one[name], moments[0][name]) for one in moments)


@pytest.mark.parametrize("kind", ["frozen", "limited", "refreshed"])
@pytest.mark.parametrize("method", QUANTISED.values(), ids=QUANTISED)
def test_quantised_in_scale_nothing_is_lost(method: tw.Method, kind: str) -> None:
    check_nothing_lost(method, MEMORIES[kind])


@pytest.mark.parametrize("kind", WITHOUT_LIMIT)
@pytest.mark.parametrize("method", LOW_RANK.values(), ids=LOW_RANK)
def test_low_rank_in_scale_nothing_is_lost(method: tw.Method, kind: str) -> None:
    check_nothing_lost(method, WITHOUT_LIMIT[kind])


@pytest.mark.parametrize("kind", ["limited", "refreshed"])
@pytest.mark.parametrize("sum_bits", [None, 4])
def test_between_hosts_nothing_is_lost(sum_bits: int | None, kind: str) -> None:
    method = tw.Quantized(bits=1, sum_bits=sum_bits, per_host=2, dense_fallback=False)
    check_nothing_lost(method, MEMORIES[kind], world=4)


def check_nothing_lost(method: tw.Method, memory: AdamMomentum, world: int = WORLD) -> None:
    """To the rounding of c / divisor x divisor: some units in the last place of the larger of c and what was sent."""
    cluster = seeded(method, memory, world)
    eps = torch.finfo(torch.float32).eps
    for step in range(4):
        before = [held(cluster, rank, "residual") for rank in range(world)]
        updates = cluster.step(cluster.random(step))
        accepted = [cluster.accepted(rank) for rank in range(world)]
        for name in COMPRESSED:
            assert all(same_bits(update[name], updates[0][name]) for update in updates)
            for rank in range(world):
                c = before[rank][name] + held(cluster, rank, "momentum")[name]
                lost = accepted[rank][name] + held(cluster, rank, "residual")[name] - c
                bound = torch.maximum(c.abs(), accepted[rank][name].abs())
                assert (lost.abs() <= 4 * eps * bound).all()
            total = sum(one[name].double() for one in accepted)
            lost = world * updates[0][name].double() - total
            sizes = sum(one[name].double().abs().sum() for one in accepted)
            assert lost.abs().sum() <= 1e-6 * sizes


def test_one_bit_is_the_sign_times_the_mean_of_c_over_its_divisor() -> None:
    """What a rank sends to another owner."""
    cluster = seeded(QUANTISED["1 bit"], MEMORIES["frozen"])
    cluster.step(cluster.random(0))
    name = "linear"
    found = 0
    for rank in range(WORLD):
        sent = cluster.accepted(rank)[name].flatten()
        c = sent + held(cluster, rank, "residual")[name].flatten()
        divisor = held(cluster, rank, "second_moment")[name].sqrt().flatten() + 1e-8
        for begin in range(0, c.numel(), 32):
            x, q = ((one / divisor)[begin : begin + 32] for one in (c, sent))
            if q.abs().std() < 1e-3 * q.abs().mean():
                found += 1
                assert torch.equal(q < 0, x < 0)
                torch.testing.assert_close(q.abs().mean(), x.abs().mean(), rtol=1e-2, atol=0)
    # Two of three ranks send each block, the third owns it.
    assert found >= 2 * (c.numel() // 32)


def test_the_largest_of_c_over_its_divisor_are_sent() -> None:
    cluster = seeded(SELECTING["TopK, fp32"], MEMORIES["frozen"])
    cluster.step(cluster.random(0))
    for name in COMPRESSED:
        sent = cluster.accepted(1)[name].flatten()
        c = sent + held(cluster, 1, "residual")[name].flatten()
        divisor = held(cluster, 1, "second_moment")[name].sqrt().flatten() + 1e-8
        wanted = (c / divisor).abs().topk(max(1, int(0.1 * c.numel()))).indices
        assert set(sent.nonzero().flatten().tolist()) == set(wanted.tolist())
        assert set(c.abs().topk(wanted.numel()).indices.tolist()) != set(wanted.tolist())


@pytest.mark.parametrize("name", [name for name in SELECTING if name != "TopK, int8"])
def test_nobody_sends_more_than_the_limit(name: str) -> None:
    """Up to the rounding of the wire; that of block codes goes by the largest of their block, and may be more."""
    cluster = seeded(SELECTING[name], MEMORIES["limited"], scale=lambda: torch.tensor(8.0))
    for step in range(3):
        cluster.step(cluster.random(step, factor=8.0))
    for rank in range(WORLD):
        for name in COMPRESSED:
            divisor = held(cluster, rank, "second_moment")[name].sqrt() + 1e-8
            in_units = cluster.accepted(rank)[name] / 8 / divisor
            assert 0.1 < in_units.abs().max() <= 0.5 * 1.01


@pytest.mark.parametrize("name", ["1 bit", "1 bit, sums in 8", "2 bits"])
def test_no_quantised_update_is_above_the_limit(name: str) -> None:
    """An owner's own share also has the rounding of the sum in it, so that the mean is what is bounded."""
    cluster = seeded(QUANTISED[name], MEMORIES["limited"])
    for step in range(3):
        updates = cluster.step(cluster.random(step))[0]
    for tensor in COMPRESSED:
        divisor = held(cluster, 0, "second_moment")[tensor].sqrt() + 1e-8
        assert 0.05 < (updates[tensor] / divisor).abs().max() <= 0.5 * 1.01


@pytest.mark.parametrize("sum_bits", [4, 8, 16])
@pytest.mark.parametrize("bits", [1, 2])
def test_owners_too_send_no_more_than_the_limit(bits: int, sum_bits: int) -> None:
    """Where sums have more bits than what is sent. One rank alone has gradients, for blocks of its own and of others."""
    method = tw.Quantized(bits=bits, sum_bits=sum_bits, dense_fallback=False)
    cluster = seeded(method, MEMORIES["limited"])
    for step in range(3):
        gradients = cluster.random(step, factor=10.0)
        for rank in range(1, WORLD):
            for gradient in gradients[rank].values():
                gradient.zero_()
        updates = cluster.step(gradients)[0]
    for tensor in COMPRESSED:
        divisor = held(cluster, 0, "second_moment")[tensor].sqrt() + 1e-8
        assert 0.1 < (WORLD * updates[tensor] / divisor).abs().max() <= 0.5 * 1.01


def test_a_host_sends_as_many_limits_as_it_has_ranks() -> None:
    """Two hosts of two ranks, of which one has gradients: half of the limit reaches the mean, as by four ranks of their own."""
    method = tw.Quantized(bits=1, sum_bits=8, per_host=2, dense_fallback=False)
    cluster = seeded(method, MEMORIES["limited"], world=4)
    for step in range(3):
        gradients = cluster.random(step, factor=10.0)
        for gradient in (one for rank in (2, 3) for one in gradients[rank].values()):
            gradient.zero_()
        updates = cluster.step(gradients)[0]
    for tensor in COMPRESSED:
        divisor = held(cluster, 0, "second_moment")[tensor].sqrt() + 1e-8
        assert 0.1 < (2 * updates[tensor] / divisor).abs().max() <= 0.5 * 1.01


@pytest.mark.parametrize("bad", ["gradient", "discarded"])
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("method", list(ALL.values())[::3], ids=list(ALL)[::3])
def test_a_skipped_step_leaves_no_trace(method: tw.Method, kind: str, bad: str) -> None:
    check_no_trace(method, MEMORIES[kind], bad)


@pytest.mark.parametrize("bad", ["gradient", "discarded"])
@pytest.mark.parametrize("kind", WITHOUT_LIMIT)
@pytest.mark.parametrize("method", LOW_RANK.values(), ids=LOW_RANK)
def test_a_skipped_step_of_low_rank_leaves_no_trace(method: tw.Method, kind: str, bad: str) -> None:
    check_no_trace(method, WITHOUT_LIMIT[kind], bad)


def check_no_trace(method: tw.Method, memory: AdamMomentum, bad: str) -> None:
    cluster = seeded(method, memory, restorable=True)
    for step in range(2):
        cluster.step(cluster.random(step))
    stores = ("momentum", "residual", "second_moment")
    before = [[held(cluster, rank, store) for store in stores] for rank in range(WORLD)]
    gradients = cluster.random(5, factor=100.0)
    if bad == "gradient":
        gradients[1]["linear"][3, 4] = torch.inf
    updates = cluster.step(gradients)
    assert all(update["linear"].isnan().any() == (bad == "gradient") for update in updates)
    for reducer in cluster.reducers:
        reducer.settle(discard=bad == "discarded")
    for rank in range(WORLD):
        for store, contents in zip(stores, before[rank], strict=True):
            now = held(cluster, rank, store)
            assert all(torch.equal(now[name], contents[name]) for name in COMPRESSED)


@pytest.mark.parametrize("kind", MEMORIES)
def test_without_a_spare_memory_a_bad_step_leaves_it_finite(kind: str) -> None:
    cluster = seeded(SELECTING["TopK"], MEMORIES[kind])
    for step in range(3):
        gradients = cluster.random(step, factor=1e30 if step == 1 else 1.0)
        if step == 2:
            gradients[2]["head"][0, 0] = torch.nan
        cluster.step(gradients)
        for rank in range(WORLD):
            for store in ("momentum", "residual", "second_moment"):
                assert all(
                    values.isfinite().all() for values in held(cluster, rank, store).values()
                )


def test_a_loss_scale_changes_nothing() -> None:
    plain = seeded(SELECTING["TopK, fp32"], MEMORIES["refreshed"])
    scales = iter([4.0, 4.0, 16.0, 2.0] * WORLD)
    now = [1.0]
    scaled = seeded(
        SELECTING["TopK, fp32"], MEMORIES["refreshed"], scale=lambda: torch.tensor(now[0])
    )
    for step in range(4):
        now[0] = next(scales)
        ours = plain.step(plain.random(step))[0]
        theirs = scaled.step(scaled.random(step, factor=now[0]))[0]
        for name in COMPRESSED:
            assert torch.equal(ours[name] * now[0], theirs[name])


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("name", ["TopK", "2 bits"])
def test_a_gradient_that_is_infinite_in_plain_units_skips_a_refresh(name: str, bits: int) -> None:
    """Under a loss scale below 1 it is finite where it is exchanged, on one rank alone."""
    memory = AdamMomentum(Refresh(every=3, bits=bits), adam=ADAM)
    scale = torch.tensor(0.1)
    cluster = seeded(ALL[name], memory, scale=lambda: scale, restorable=True)
    stores = ("momentum", "residual", "second_moment")
    for step in range(2):
        cluster.step(cluster.random(step))
    before = [held(cluster, rank, store) for rank in range(WORLD) for store in stores]
    gradients = cluster.random(2)
    gradients[1]["linear"][4, 5] = 1e38
    for update in cluster.step(gradients):
        assert all(update[name].isnan().all() for name in COMPRESSED)
    after = [held(cluster, rank, store) for rank in range(WORLD) for store in stores]
    for was, now in zip(before, after, strict=True):
        assert all(same_bits(was[name], now[name]) for name in COMPRESSED)
    assert all(
        update[name].isfinite().all()
        for update in cluster.step(cluster.random(3))
        for name in COMPRESSED
    )


def test_refresh_is_in_the_ledger_and_in_the_plan() -> None:
    cluster = seeded(SELECTING["TopK"], MEMORIES["refreshed"])
    for step in range(4):
        cluster.step(cluster.random(step))
    ledger = cluster.reducers[0].driver.ledger
    numel = sum(torch.Size(SHAPES[name]).numel() for name in COMPRESSED)
    rows = [row for (phase, _), row in ledger.rows().items() if phase == "refresh"]
    # Twice in four exchanges, as a ring all-reduce sends it.
    wanted = 2 * 2 * (WORLD - 1) / WORLD * (1 + 2 / 128) * numel
    assert sum(row.payload_bytes for row in rows) == pytest.approx(wanted, rel=0.05)
    held_bytes, _ = cluster.reducers[0].assignments.memory_bytes()
    assert held_bytes == 12 * numel


# -- real workers --------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 5)
    )


def train(ddp, optimizer, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()


def ddp_job(rank: int, world: int, adapter: str) -> None:
    """Replicas stay alike over the turn, a rule ends the dense start, and a resumed run has the same bits."""
    method = tw.AdamScale(
        method=tw.TopK(density=0.1),
        start=tw.Settled(tolerance=100.0, steps=2, at_least=2),
        divisor=Refresh(every=3),
        limit=3.0,
    )

    def begin() -> tuple[Any, ...]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if adapter == "ddp":
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
            options = {"optimizer": optimizer, "deterministic": True}
            return model, ddp, optimizer, tw.attach(ddp, method, **options)
        return model, *make(adapter, model, optimizer, method, deterministic=True)

    model, ddp, optimizer, handle = begin()
    train(ddp, optimizer, rank, range(8))
    assert not handle.plan()["0.weight"].dense
    inner = getattr(optimizer, "optimizer", optimizer)
    state = copy.deepcopy((model.state_dict(), inner.state_dict(), handle.state_dict()))
    train(ddp, optimizer, rank, range(8, 12))
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(whole) for _ in range(world)]
    torch.distributed.all_gather(everyone, whole)
    assert all(torch.equal(one, whole) for one in everyone)
    handle.close()
    model, ddp, optimizer, handle = begin()
    inner = getattr(optimizer, "optimizer", optimizer)
    model.load_state_dict(state[0])
    inner.load_state_dict(state[1])
    handle.load_state_dict(state[2])
    train(ddp, optimizer, rank, range(8, 12))
    assert torch.equal(whole, torch.cat([p.detach().flatten() for p in model.parameters()]))
    handle.close()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_real_workers_agree_and_resume(pools, adapter: str) -> None:
    pools(3).run(ddp_job, adapter)


def scaler_job(rank: int, world: int) -> None:
    """A GradScaler skips a step everywhere; training goes on as if it had not been."""
    results = []
    for bad in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        method = tw.AdamScale(method=tw.TopK(density=0.1, values="fp32"), start=3, limit=3.0)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        handle = tw.attach(ddp, method, optimizer=optimizer, grad_scaler=scaler, deterministic=True)
        for step in range(8):
            for attempt in range(2 if bad and step == 5 else 1):
                generator = torch.Generator().manual_seed(100 * step + rank)
                x = torch.randn(8, 20, generator=generator)
                if bad and step == 5 and attempt == 0 and rank == 1:
                    x[0, 0] = torch.inf
                optimizer.zero_grad()
                scaler.scale(ddp(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert not handle.plan()["0.weight"].dense
        handle.close()
    assert torch.equal(*results)


def test_a_grad_scaler_skips_everywhere(pools) -> None:
    pools(2).run(scaler_job)
