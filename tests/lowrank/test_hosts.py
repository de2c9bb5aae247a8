"""Low rank between hosts: factors summed inside each host first, on virtual ranks and on gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.lowrank import test_contracts as contracts
from tests.lowrank.ranks import Ranks, describe, random_gradients
from tests.lowrank.test_ddp import make_odd
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.errors import ExchangeError, UsageError
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.base import Method
from thinwire.methods.powersgd import PowerSGD

F32, F64 = torch.float32, torch.float64
METHODS = [
    PowerSGD(rank=4, dense_fallback=False, per_host=2),
    PowerSGD(rank=3, subspace_refresh_every=3, dense_fallback=False, per_host=2),
    PowerSGD(rank=4, wire="bf16", dense_fallback=False, per_host=2),
    ACPSGD(rank=4, dense_fallback=False, per_host=2),
    ACPSGD(rank=4, wire="bf16", dense_fallback=False, per_host=2),
]
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


@pytest.mark.parametrize(
    ("per_host", "world", "deterministic"),
    [(2, 4, False), (3, 6, True), (2, 6, False), (4, 4, False), (1, 2, False)],
)
@each_method
def test_nothing_is_lost(method, per_host, world, deterministic):
    contracts.test_nothing_is_lost(replace(method, per_host=per_host), world, deterministic)


@each_method
@pytest.mark.parametrize(
    "contract",
    [
        contracts.test_a_bad_step_leaves_every_bit,
        contracts.test_a_step_can_be_discarded_after_memory_was_read,
        contracts.test_an_unused_parameter_keeps_what_it_holds,
        contracts.test_an_overflow_is_a_bad_step_and_does_not_stay,
        contracts.test_a_layer_whose_first_gradient_is_zero_revives,
    ],
)
def test_the_contracts_of_a_step(contract, method):
    contract(method, world=4)


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3]], ids=str)
def test_another_bucketing_gives_the_same_bits_when_deterministic(method):
    contracts.test_another_bucketing_gives_the_same_bits_when_deterministic(method, world=4)


@pytest.mark.parametrize("per_host", [2, 3])
@pytest.mark.parametrize(
    "method",
    [
        PowerSGD(rank=2, dense_fallback=False),
        PowerSGD(rank=2, subspace_refresh_every=4, dense_fallback=False),
        ACPSGD(rank=2, dense_fallback=False),
    ],
    ids=str,
)
def test_it_is_a_dense_mean_inside_the_host_and_low_rank_between(method, per_host):
    """Two workers that each have the mean gradient of a host, against the ranks of two hosts, in float64."""
    infos = [
        describe("a", (12, 20), F64),
        describe("b", (12, 20), F64),
        describe("c", (9, 30), F64),
    ]
    hosts = Ranks(method, infos, 2)
    ranks = Ranks(replace(method, per_host=per_host), infos, 2 * per_host)
    for step in range(12):
        gradients = random_gradients(infos, 2 * per_host, step)
        members = [gradients[:per_host], gradients[per_host:]]
        means = [{i.name: sum(g[i.name] for g in m) / per_host for i in infos} for m in members]
        update, _ = ranks.step(gradients)
        expected, _ = hosts.step(means)
        for info in infos:
            assert torch.allclose(update[info.name], expected[info.name], rtol=0, atol=1e-10)
            for host in range(2):
                own = range(host * per_host, (host + 1) * per_host)
                held = sum(ranks.residual(rank, info.name) for rank in own) / per_host
                assert torch.allclose(held, hosts.residual(host, info.name), rtol=0, atol=1e-10)


def sent_by_scope(ranks: Ranks, rank: int) -> tuple[int, int, int]:
    """(bytes inside the host, bytes between hosts, collectives)."""
    rows = ranks.ledgers[rank].rows()
    inside = sum(row.sent_bytes for (phase, _), row in rows.items() if "/inside/" in phase)
    total = ranks.ledgers[rank].total()
    return inside, total.sent_bytes - inside, total.messages


@pytest.mark.parametrize(("wire", "itemsize"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_bytes_inside_and_between_hosts_are_what_the_formula_says(method, wire, itemsize):
    """Between hosts a host sends what one of as many workers would, every local rank the same share of it."""
    infos = [describe("a", (64, 48), F32), describe("b", (32, 96), F32)]
    per_host, hosts, steps = 4, 3, 4
    world, flags = per_host * hosts, len(infos) + 1
    ranks = Ranks(method(rank=3, wire=wire, per_host=per_host), infos, world)
    numbers = 0
    for step in range(steps):
        ranks.step(random_gradients(infos, world, step))
        numbers += ranks.numbers + flags
    phases = 2 if method is PowerSGD else 1
    both_sides = 3 * (64 + 48 + 32 + 96)
    assert numbers == steps * (both_sides * phases // 2 + flags)
    # Pieces are padded to one size, and the pieces of narrow pieces once more.
    slack = 2 * steps * phases * per_host * hosts * 4
    inside = 2 * (per_host - 1) / per_host * 4 * numbers
    between = 2 * (hosts - 1) / hosts * itemsize * numbers / per_host
    collectives = steps * phases * (3 if wire == "fp32" else 4)
    for rank in range(world):
        found = sent_by_scope(ranks, rank)
        assert found[0] == pytest.approx(inside, abs=slack)
        assert found[1] == pytest.approx(between, abs=slack)
        assert found[2] == collectives
        assert found == sent_by_scope(ranks, 0)
    per_step = ranks.expected
    last = ranks.numbers + flags
    assert per_step == pytest.approx((inside + between) * last / numbers)


def test_flags_and_padding_are_control():
    """They lie behind the factors, so that the last of a host's pieces has fewer of these, or none."""
    infos = [describe("w", (10, 11), F32)]
    ranks = Ranks(ACPSGD(rank=1, dense_fallback=False, per_host=5), infos, 10)
    mode = ranks.compressors[0].mode("w", 0)
    ranks.step(random_gradients(infos, 10, 0))
    numbers = 10 if mode == "p" else 11
    share = -(-(numbers + 2) // 5)
    left = numbers
    for rank in range(5):
        row = ranks.ledgers[rank].rows()["lowrank", "all_reduce"]
        assert row.sent_bytes == 4 * share
        assert row.payload_bytes == 4 * min(left, share)
        left -= min(left, share)
    assert left == 0


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_simulated_workers_have_hosts_too(method):
    trained = []
    for per_host in (2, None):
        model = make_cnn()
        setting = method(rank=2, min_compression_rate=1.0, per_host=per_host)
        sim = tw.simulate(model, setting, workers=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = [batches(rank, 4) for rank in range(4)]
        for _ in range(4):
            sim.step(
                lambda images, labels: nn.functional.cross_entropy(model(images), labels),  # noqa: B023
                [next(one) for one in data],
            )
            optimizer.step()
        phases = {phase for phase, _ in sim.handles[3].ledger.rows()}
        assert any("/inside/" in phase for phase in phases) == (per_host is not None)
        trained.append([p.detach() for p in model.parameters()])
    for found, expected in zip(*trained, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# -- real processes ---------------------------------------------------------------------------------------------


def replicas_job(rank: int, world: int) -> tuple[bytes, set[str], bool]:
    """Both methods in one model with everything a hook meets, and a step with inf on one rank."""
    torch.manual_seed(rank)
    two_phase, alternating = (
        PowerSGD(rank=2, min_compression_rate=1.0, per_host=2),
        ACPSGD(rank=2, min_compression_rate=1.0, per_host=2),
    )
    ddp = DistributedDataParallel(make_odd(), bucket_cap_mb=0.01, find_unused_parameters=True)
    handle = tw.attach(ddp, two_phase, policy=[tw.rule("layers.*", method=alternating)])
    handle.reducer.coalesce_bytes = 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    train(ddp, optimizer, batches(rank, 12))
    held = handle.residual("enter.weight")
    images, labels = next(iter(batches(rank, 1, seed=2)))
    if rank == 3:
        images[0, 0, 0, 0] = float("inf")
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(images), labels).backward()
    bad = not bool(ddp.module.enter.weight.grad.isfinite().any())
    # Nothing of rank 3's gradient is finite; the others' waits with what was held.
    waiting = handle.residual("enter.weight")
    bad = bad and bool(waiting.isfinite().all()) and torch.equal(waiting, held) == (rank == 3)
    train(ddp, optimizer, batches(rank, 6, seed=1))
    phases = {phase for phase, _ in handle.ledger.rows()}
    assert all(p.isfinite().all() for p in ddp.parameters())
    handle.close()
    return fingerprint(ddp), phases, bad


def test_replicas_of_two_hosts_on_gloo_are_bit_identical(pools):
    results = pools(4).run(replicas_job)
    assert len({result[0] for result in results}) == 1
    assert all(result[2] for result in results)
    assert {f"{p}/inside/pieces" for p in ("lowrank", "lowrank/p", "lowrank/q")} <= results[0][1]


def resume_job(rank: int, world: int, method: Method, folder: str) -> list[bool]:
    """A switch keeps what is held; resumed in another bucketing bit for bit, and without hosts to rounding."""

    def start(cap: float, method: Method) -> tuple[DistributedDataParallel, tw.Handle]:
        ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=cap)
        return ddp, tw.attach(ddp, method, deterministic=True)

    data = list(batches(rank, 8))
    whole, handle = start(0.02, method)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    train(whole, optimizer, iter(data[:4]))
    file = Path(folder) / f"{rank}.pt"
    torch.save((whole.module.state_dict(), handle.state_dict()), file)
    train(whole, optimizer, iter(data[4:]))
    held = handle.residual("6.weight")
    handle.switch(replace(method, per_host=None))
    same = [torch.equal(handle.residual("6.weight"), held)]
    handle.close()
    for setting in (method, replace(method, per_host=None)):
        resumed, handle = start(25, setting)
        weights, state = torch.load(file, weights_only=True)
        resumed.module.load_state_dict(weights)
        handle.load_state_dict(state)
        train(resumed, torch.optim.SGD(resumed.parameters(), lr=0.05), iter(data[4:]))
        pairs = zip(resumed.parameters(), whole.parameters(), strict=True)
        exact = setting is method
        same.append(all((a - b).abs().max() <= (0 if exact else 1e-4) for a, b in pairs))
        handle.close()
    return same


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_resume_with_another_bucketing_and_without_hosts(pools, method, tmp_path):
    setting = method(rank=2, min_compression_rate=1.0, per_host=2)
    for same in pools(4).run(resume_job, setting, str(tmp_path)):
        assert same == [True, True, True]


def optimizer_job(rank: int, world: int) -> tuple[bytes, set[str]]:
    """Without DDP, and from the second of two phases on."""
    model = make_cnn()
    method = tw.Timeline(
        phases=((0, tw.Dense()), (2, ACPSGD(rank=2, min_compression_rate=1.0, per_host=2)))
    )
    optimizer = tw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model=model, method=method
    )
    train(model, optimizer, batches(rank, 5))
    phases = {phase for phase, _ in optimizer.handle.ledger.rows()}
    optimizer.handle.close()
    return fingerprint(model), phases


def test_distributed_optimizer_and_timeline(pools):
    results = pools(4).run(optimizer_job)
    assert len({result[0] for result in results}) == 1
    assert "lowrank/inside/sums" in results[0][1]


def refusal_job(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    with pytest.raises(ExchangeError) as odd:
        tw.attach(ddp, ACPSGD(per_host=3))
    other = tw.rule("weight", method=tw.TopK(exchange=tw.exchange.Hierarchical(per_host=4)))
    with pytest.raises(UsageError) as two:
        tw.attach(ddp, ACPSGD(per_host=2), policy=[other])
    dist.barrier()
    return f"{odd.value}; {two.value}"


def test_hosts_that_cannot_be_are_refused(pools):
    (sentence,) = set(pools(4).run(refusal_job))
    assert "per_host is 3; it must divide the number of ranks, 4" in sentence
    assert "per_host is [2, 4] in one plan" in sentence
    with pytest.raises(UsageError, match="per_host is 0"):
        PowerSGD(per_host=0)
