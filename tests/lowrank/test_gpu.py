"""The low-rank path on CUDA: the kernel against QR, and steps that never make the host wait."""

from __future__ import annotations

import pytest
import torch

from tests.lowrank.ranks import describe
from thinwire.compressor import GroupStep
from thinwire.exchange.drivers import run_virtual
from thinwire.exchange.requests import Place
from thinwire.kernels.inspection import inspect_pieces
from thinwire.layout import BucketLayout
from thinwire.lowrank.basis import orthogonalise
from thinwire.lowrank.batches import make_batches
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import matrices_of
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.powersgd import PowerSGD
from thinwire.plan.groups import Group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
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
        compressors = [method.compressor() for _ in range(2)]
        generator = torch.Generator().manual_seed(0)
        for count in range(6):
            opened = []
            for rank, compressor in enumerate(compressors):
                drawn = [torch.randn(slot.numel, generator=generator) for slot in group.slots]
                flags, finite = inspect_pieces([piece.to(device) for piece in drawn])
                step = GroupStep(
                    group, finite, flags, [count] * len(drawn), None, Place(rank, 2), False
                )
                torch.cuda.set_sync_debug_mode("error" if count > 3 else "default")
                opened.append(compressor.open(step))
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
