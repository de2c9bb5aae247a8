"""The low-rank path on CUDA: kernels against QR and against torch, and steps that never make the host wait."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.contracts.cluster import Cluster
from tests.kernels.cpu_compiler import switch
from tests.lowrank.ranks import describe
from thinwire.compress import GroupStep, Terms
from thinwire.engine.virtual import run_virtual
from thinwire.exchange.requests import Place
from thinwire.kernels.cuda.toolchain import kernels_for
from thinwire.layout import BucketLayout, Group
from thinwire.lowrank.basis import orthogonalise
from thinwire.lowrank.batches import make_batches
from thinwire.lowrank.cuda.kernels import has_products
from thinwire.lowrank.cuda.products import KernelSent
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import matrices_of
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.powersgd import PowerSGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = {
    "attention": (1024, 1024),
    "bias": (1023,),
    "up": (4096, 1024),
    "down": (1024, 4096),
    "conv": (512, 512, 3, 3),
    "stem": (64, 3, 7, 7),
    "odd": (331, 517),
    "tall": (30_528, 64),
}
SHAPES = {"a": (300, 70), "b": (300, 70), "c": (2000, 64), "d": (33, 190), "e": (300, 70)}


def make_group(device: str) -> Group:
    slots, offset = [], 0
    for name, shape in SHAPES.items():
        info = describe(name, shape, torch.float32)
        slots.append(info.slot(offset))
        offset += info.numel
    layout = BucketLayout(tuple(slots), offset, torch.float32, torch.device(device))
    return Group.of(layout, slots, torch.float32)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("spoilt", ["nothing", "dependent", "dead", "tiny"])
def test_bases_on_the_device_span_what_qr_spans(rank, spoilt):
    group = make_group("cuda")
    shapes = [matrices_of(slot) for slot in group.slots]
    batches = make_batches(group, shapes, rank, [None] * len(shapes), False)
    sides = ["p"] * len(batches)
    generator = torch.Generator().manual_seed(rank)
    spares = [torch.randn(b.factor_shape("p"), generator=generator).cuda() for b in batches]
    layout = FactorLayout(batches, sides, lambda: spares)
    factors = [torch.randn(b.factor_shape("p"), generator=generator) for b in batches]
    for factor in factors:
        if spoilt == "dependent" and rank > 1:
            factor[:, :, rank - 1] = -2 * factor[:, :, 0]
        if spoilt == "dead":
            factor[:, :, 0] = 0
        if spoilt == "tiny":
            factor *= 1e-30
    flat = torch.cat([factor.reshape(-1) for factor in factors]).cuda()
    found = layout.sections(layout.orthogonalise(flat))
    for factor, basis in zip(factors, found, strict=True):
        wide = basis.cpu().double()
        eye = torch.eye(wide.shape[2], dtype=torch.float64).expand(len(wide), -1, -1)
        assert torch.allclose(wide.mT @ wide, eye, rtol=0, atol=1e-6)
        scaled = factor.double() / factor.abs().max().clamp(min=1e-35)
        assert torch.allclose(wide @ (wide.mT @ scaled), scaled, rtol=0, atol=1e-5)
        if spoilt == "nothing":
            plain = orthogonalise(factor.double(), factor.double())
            assert torch.allclose(wide @ wide.mT, plain @ plain.mT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", [PowerSGD(rank=4), ACPSGD(rank=4), ACPSGD(rank=16)], ids=str)
def test_steps_match_the_cpu_and_never_wait(method):
    updates = {}
    for device in ("cpu", "cuda"):
        group = make_group(device)
        # Not aligned: the products in torch are compared.
        plans = [
            method.compressor().plan(group, Terms(Place(r, 2), torch.float32, aligned=False))
            for r in range(2)
        ]
        routes = [{} for _ in plans]
        numel = max(slot.offset + slot.numel for slot in group.sources)
        generator = torch.Generator().manual_seed(0)
        for count in range(6):
            opened = []
            for plan, known in zip(plans, routes, strict=True):
                flat = torch.randn(numel, generator=generator).to(device)
                counts = [count] * len(group.slots)
                modes = plan.begin(counts)
                if modes not in known:
                    known[modes] = plan.route(modes)
                torch.cuda.set_sync_debug_mode("error" if count > 3 else "default")
                opened.append(known[modes].open(GroupStep(flat, counts, None)))
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.set_sync_debug_mode("error" if count > 3 else "default")
            outcomes = run_virtual([one.program for one in opened])
            for one, outcome in zip(opened, outcomes, strict=True):
                one.account.settle(outcome.non_finite)
            torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(outcomes[0].update, outcomes[1].update)
        updates[device] = outcomes[0].update.cpu()
    difference = (updates["cpu"] - updates["cuda"]).norm() / updates["cpu"].norm()
    assert difference < 1e-2


def draw(cluster: Cluster, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        {
            name: torch.randn(info.shape, generator=generator, device="cuda").to(cluster.dtype)
            for name, info in cluster.infos.items()
        }
        for _ in range(cluster.world)
    ]


def test_the_kernels_are_used():
    assert all(has_products(torch.device("cuda", 0), rank, torch.float32) for rank in (4, 32))


def run_steps(method, dtype, fused):
    """Updates and residuals after four steps."""
    cluster = Cluster(2, method, shapes=LAYERS, dtype=dtype, device="cuda")
    for count in range(4):
        gradients = draw(cluster, count)
        torch.cuda.set_sync_debug_mode("error" if fused and count > 1 else "default")
        try:
            updates = cluster.step(gradients)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        sent = [a.sent for p in cluster.reducers for a in p.record.accounts]
        assert all(isinstance(one, KernelSent) == fused for one in sent)
        assert all(torch.equal(updates[0][name], updates[1][name]) for name in LAYERS)
    return updates, [cluster.residuals(rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("rank", "dtype"),
    [(1, torch.float32), (4, torch.float32), (4, torch.bfloat16), (32, torch.float32)],
)
@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_kernels_compute_what_torch_computes(method, rank, dtype):
    """Whole buckets of real layers; in later steps the host may not wait."""
    results = []
    for fused in (True, False):
        with switch("cuda", kernels_for(torch.device("cuda", 0)) if fused else None):
            results.append(run_steps(method(rank=rank, dense_fallback=False), dtype, fused))
    (updates, held), (wanted, others) = results
    bound = 1e-3 if dtype == torch.float32 else 3e-2
    for mine, theirs in ((updates, wanted), (held, others)):
        for rank_number, name in itertools.product(range(2), LAYERS):
            left, right = mine[rank_number][name].float(), theirs[rank_number][name].float()
            # Gradients are normal numbers.
            assert (left - right).norm() <= bound * left.numel() ** 0.5, (name, rank_number)


@pytest.mark.parametrize("method", [PowerSGD(rank=4), ACPSGD(rank=4), ACPSGD(rank=32)], ids=str)
def test_nothing_is_lost_and_a_bad_step_costs_nothing(method):
    cluster = Cluster(2, method, shapes=LAYERS, device="cuda")
    held = [{name: torch.zeros((), device="cuda") for name in LAYERS} for _ in range(2)]
    for count in range(4):
        gradients = draw(cluster, count)
        if count == 2:
            gradients[1]["up"][17, 5] = torch.inf
        updates = cluster.step(gradients)
        after = [cluster.residuals(rank) for rank in range(2)]
        gradients[1]["up"].nan_to_num_(posinf=0.0)
        for name in ("attention", "up", "down", "conv", "odd", "tall"):
            if count == 2:
                assert all(torch.isnan(updates[rank][name]).all() for rank in range(2))
                for rank in range(2):
                    assert torch.equal(after[rank][name], held[rank][name] + gradients[rank][name])
                continue
            given = sum(held[rank][name].double() + gradients[rank][name] for rank in range(2))
            found = 2 * updates[0][name].double() + sum(after[rank][name] for rank in range(2))
            assert (found - given).abs().sum() <= 1e-6 * given.abs().sum()
        held = after


def test_another_bucketing_gives_the_same_bits_when_deterministic():
    """Other neighbours, other addresses."""
    shapes = {name: LAYERS[name] for name in ("attention", "bias", "conv", "odd")}
    updates = []
    for buckets in ([list(shapes)], [["odd", "bias"], ["conv", "attention"]]):
        cluster = Cluster(2, PowerSGD(rank=4), shapes=shapes, device="cuda", deterministic=True)
        cluster.buckets = buckets
        for count in range(3):
            found = cluster.step(draw(cluster, count))
        updates.append(found[0])
    assert all(torch.equal(updates[0][name], updates[1][name]) for name in shapes)
