"""Contract 3: a non-finite gradient is seen and does not poison. Here memory keeps the finite part of a bad step, which is
`skipped="keep"`; `test_skipped_steps.py` has the rule that forgets it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import Cluster, same_bits, sparse
from tests.contracts.test_broken_steps import hand_in
from tests.models import fingerprint
from thinwire.errors import WireError
from thinwire.kernels.inspection import inspect_pieces
from thinwire.methods.base import Method

METHODS = [
    sparse("bf16"),
    tw.PowerSGD(rank=2, dense_fallback=False),
    tw.ACPSGD(rank=2, dense_fallback=False),
    tw.Quantized(block=32, dense_fallback=False),
]
ALWAYS_SPARSE = {"density": 0.05, "dense_fallback": False}
TWO_BUCKETS = [["head", "scalar", "linear"], ["bias", "conv"]]


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["conv", "bias"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_one_bad_element_on_one_rank_costs_one_step_and_no_mass(poison, where, method):
    cluster = Cluster(3, method)
    cluster.buckets = TWO_BUCKETS
    cluster.step(cluster.random(0))
    before = [cluster.residuals(rank) for rank in range(3)]
    gradients = cluster.random(1)
    gradients[1][where].view(-1)[3] = poison
    for update in cluster.step(gradients):
        assert update["conv"].isnan().all() and update["bias"].isnan().all()
        assert update["linear"].isfinite().all()
    for rank in range(3):
        for name in ("conv", "linear", "head"):
            finite = gradients[rank][name].nan_to_num(0.0, 0.0, 0.0)
            assert same_bits(cluster.residuals(rank)[name], before[rank][name] + finite)
    assert all(u.isfinite().all() for u in cluster.step(cluster.random(2))[0].values())


def test_overflow_that_only_the_reduction_makes_costs_one_step_and_no_mass():
    cluster = Cluster(2, sparse("fp32"))
    gradients = cluster.random(0)
    for rank in range(2):
        gradients[rank]["linear"][4, 5] = 3e38
    for update in cluster.step(gradients):
        assert update["linear"].isnan().all()
    for rank in range(2):
        held = cluster.residuals(rank)
        assert all(
            same_bits(held[name], gradients[rank][name]) for name in ("conv", "linear", "head")
        )


def test_overflow_that_only_the_cast_makes_costs_one_step_and_no_mass():
    """fp16 gradients: residual and gradient are finite, their sum does not fit the gradient's dtype."""
    cluster = Cluster(2, sparse("fp32", density=0.02), dtype=torch.float16)
    gradients = cluster.random(0)
    for rank in range(2):
        # Two entries per row compete for one place, so that one of them waits a step.
        gradients[rank]["linear"][4, 5] = 6e4
        gradients[rank]["linear"][4, 6] = 5e4
    cluster.step(gradients)
    before = cluster.residuals(0)["linear"]
    assert before[4, 6] == 5e4 // 32 * 32
    update = cluster.step(gradients)[1]["linear"]
    assert update.isnan().all()
    assert same_bits(cluster.residuals(0)["linear"], before + gradients[0]["linear"].float())


def test_overflow_inside_memory_is_seen_and_never_stays():
    cluster = Cluster(2, sparse("fp32"))
    gradients = cluster.random(0)
    gradients[0]["linear"][4, 5] = gradients[0]["linear"][4, 6] = 3e38
    gradients[0]["linear"][4, 7] = 3.1e38
    for _ in range(3):
        cluster.step(gradients)
        assert all(r.isfinite().all() for r in cluster.residuals(0).values())


OVERFLOWING: dict[str, Method] = {
    "ADTopK": sparse(),
    "ADTopK, memory in int8": sparse(memory=tw.memory.Residual(storage="int8")),
    "OkTopK": tw.OkTopK(**ALWAYS_SPARSE),
    "OkTopK, published": tw.OkTopK(thresholds="published", **ALWAYS_SPARSE),
    "GTopK": tw.GTopK(**ALWAYS_SPARSE),
    "TopKDSA": tw.TopKDSA(**ALWAYS_SPARSE),
    "ExclusiveTopK": tw.ExclusiveTopK(**ALWAYS_SPARSE),
    "cyclic leader": tw.TopK(exchange=tw.exchange.CyclicLeader(), **ALWAYS_SPARSE),
    "hosts": tw.TopK(exchange=tw.exchange.Hierarchical(per_host=2), **ALWAYS_SPARSE),
    "RandomK": tw.RandomK(**ALWAYS_SPARSE),
    "ChunkTopK": tw.ChunkTopK(**ALWAYS_SPARSE),
    "GaussianK, published": tw.GaussianK(finish="published", **ALWAYS_SPARSE),
    "RedSync, published": tw.RedSync(finish="published", **ALWAYS_SPARSE),
    "SignSGD": tw.SignSGD(memory=tw.memory.Residual()),
    "Quantized": tw.Quantized(block=32, dense_fallback=False),
    "Quantized, 2 bits": tw.Quantized(bits=2, block=32, dense_fallback=False),
    "Quantized, hosts": tw.Quantized(block=32, per_host=2, dense_fallback=False),
    "PowerSGD": tw.PowerSGD(rank=2, dense_fallback=False),
}


@pytest.mark.parametrize("place", [0, 200, -1])
@pytest.mark.parametrize("breaks_off", [False, True])
@pytest.mark.parametrize("method", OVERFLOWING.values(), ids=OVERFLOWING.keys())
def test_an_overflow_never_stays_wherever_it_is_and_however_the_step_ends(
    method, place, breaks_off
):
    """What is held and the gradient are finite, and their sum is not."""
    cluster = Cluster(4, method)
    gradients = cluster.random(0)
    held = torch.zeros(cluster.infos["linear"].shape)
    held.view(-1)[place] = gradients[2]["linear"].view(-1)[place] = 3e38
    assert cluster.reducers[2].assignments.write_memory("linear", "residual", held)
    if breaks_off:
        hand_in(cluster, list(cluster.infos), gradients)
        for reducer in cluster.reducers:
            reducer.settle(discard=True)
    else:
        for update in cluster.step(gradients):
            assert update["linear"].isnan().all()
    for rank in range(4):
        assert all(held.isfinite().all() for held in cluster.residuals(rank).values())


def test_overflow_inside_a_flush_is_seen_and_never_stays():
    cluster = Cluster(2, sparse("fp32"))
    gradients = cluster.random(0)
    gradients[0]["linear"][4, 5] = 3e38
    gradients[0]["linear"][4, 6] = gradients[0]["linear"][4, 7] = 2e38
    cluster.step(gradients)
    cluster.switch(tw.Dense())
    assert cluster.step(gradients)[0]["linear"].isnan().all()
    assert all(r.isfinite().all() for r in cluster.residuals(0).values())


def test_discarded_step_returns_everything_even_after_somebody_looked():
    cluster = Cluster(2, sparse("bf16"))
    cluster.step(cluster.random(0))
    for look in (False, True):
        before = [cluster.residuals(rank) for rank in range(2)]
        gradients = cluster.random(1)
        cluster.step(gradients)
        for rank in range(2):
            if look:
                cluster.residuals(rank)
            cluster.reducers[rank].settle(discard=True)
            cluster.reducers[rank].settle(discard=True)
            for name in ("conv", "linear", "head"):
                expected = before[rank][name] + gradients[rank][name]
                assert same_bits(cluster.residuals(rank)[name], expected)


@pytest.mark.parametrize("look", [False, True])
def test_discarded_flush_is_repeated(look):
    cluster = Cluster(2, sparse())
    cluster.step(cluster.random(0))
    held = cluster.residuals(0)["linear"]
    cluster.switch(tw.Dense())
    gradients = cluster.random(1)
    cluster.step(gradients)
    for rank in range(2):
        if look:
            assert not cluster.residuals(rank)["linear"].any()
        cluster.reducers[rank].settle(discard=True)
    assert same_bits(cluster.residuals(0)["linear"], held + gradients[0]["linear"])
    cluster.step(cluster.random(2))
    assert not cluster.residuals(0)["linear"].any()


def test_failed_exchange_returns_what_it_had_sent(monkeypatch):
    cluster = Cluster(2, sparse())
    gradients = cluster.random(0)

    def refuse(self, payload):
        raise WireError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("thinwire.wire.codec.Codec.decode", refuse)
        with pytest.raises(WireError):
            cluster.step(gradients)
    assert same_bits(cluster.residuals(0)["linear"], gradients[0]["linear"])


def test_growth_and_backoff_of_the_scale_leave_the_residual_in_gradient_units():
    scale = torch.tensor(1024.0)
    scaled = Cluster(2, sparse("bf16"), scale=lambda: scale)
    plain = Cluster(2, sparse("bf16"))
    for seed, factor in enumerate([1.0, 2.0, 2.0, 0.5, 0.25]):
        scale.mul_(factor)
        gradients = plain.random(seed)
        expected = plain.step(gradients)
        blown_up = [{name: g * scale for name, g in rank.items()} for rank in gradients]
        updates = scaled.step(blown_up)
        for name in expected[0]:
            assert same_bits(updates[0][name] / scale, expected[0][name])
            assert same_bits(scaled.residuals(1)[name], plain.residuals(1)[name])


def test_a_slot_has_a_gradient_however_small_or_large():
    tiny, huge = (torch.tensor([0.0, v], dtype=torch.float64) for v in (1e-300, 1e300))
    flags, _ = inspect_pieces([tiny, huge, torch.zeros(3, dtype=torch.float64)])
    assert flags.had_gradient.tolist() == [True, True, False]
    assert not flags.non_finite


# -- GradScaler on gloo -----------------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


WATCHED = ("0.weight", "2.weight")


def scaler_job(
    rank: int, world: int, adapter: str, overflow: str, method: Method, skipped: str
) -> tuple:
    """Nine steps under a scaler that grows; the fifth overflows in one element of the last layer."""
    model = two_layers()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    applied = []
    plain.register_step_post_hook(lambda *_: applied.append(step))
    options = {"grad_scaler": scaler, "skipped": skipped}
    module, optimizer, handle = make(adapter, model, plain, method, bucket_kb=4, **options)
    generator = torch.Generator().manual_seed(rank)
    local: dict[str, torch.Tensor] = {}
    for name in WATCHED:
        model.get_parameter(name).register_hook(lambda g, n=name: local.update({n: g.double()}))
    scales, books = [], []
    for step in range(9):
        loss = module(torch.randn(8, 32, generator=generator)).square().mean()
        if step == 4 and overflow == "reduction":
            loss = loss + 3e38 / scaler.get_scale() * model[2].weight[0, 0]
            plain.param_groups[0]["lr"] = 0.0
        if step == 4 and overflow == "one rank" and rank == 1:
            loss = loss + torch.inf * model[2].weight[0, 0]
        before = {name: handle.residual(name).double() for name in WATCHED}
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        for name in WATCHED:
            c, held = before[name], handle.residual(name).double()
            if skipped == "keep" or step in applied:
                c = c + torch.where(local[name].isfinite(), local[name], 0) / scale
            else:
                assert torch.equal(held, c), "a skipped step leaves no trace"
            sent = model.get_parameter(name).grad.double() if step in applied else 0 * c
            books.append((c, sent, held))
    handle.close()
    return fingerprint(model), applied, scales, books


SCALED = [
    *itertools.product(ADAPTERS, ["one rank", "reduction"], [sparse("bf16", density=0.1)]),
    ("optimizer", "one rank", tw.PowerSGD(rank=2)),
    ("optimizer", "one rank", tw.ACPSGD(rank=2)),
]


@pytest.mark.parametrize("skipped", ["forget", "keep"])
@pytest.mark.parametrize(
    ("adapter", "overflow", "method"),
    SCALED,
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_grad_scaler_skips_everywhere_and_loses_nothing_else(
    pools, adapter, overflow, method, skipped
):
    results = pools(2).run(scaler_job, adapter, overflow, method, skipped)
    assert results[0][:3] == results[1][:3]
    _, applied, scales, _ = results[0]
    assert applied == [0, 1, 2, 3, 5, 6, 7, 8]
    assert scales == [256, 256, 512, 512, 256, 256, 256, 512, 512]
    for ours, other in zip(results[0][3], results[1][3], strict=True):
        c = ours[0] + other[0]
        total = 2 * ours[1] + ours[2] + other[2]
        for every in (slice(None), slice(1, None)):
            assert (total - c)[every].abs().sum() <= 1e-6 * c[every].abs().sum()
