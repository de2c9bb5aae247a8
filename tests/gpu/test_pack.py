"""The packing kernels on a GPU against torch on the CPU and on the GPU: one format, every bit of it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_pack import LAYOUTS, take_steps
from tests.memory.test_storage import KINDS, NARROW, SIZES, draw, fill, make_group
from thinwire.kernels.cuda.pack import PIECE
from thinwire.memory.storage import STORAGES, PackedBinding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE = (1 << 20, 300 * PIECE + 129, 5, 25_088 * 64)


def packed(storage, sizes, values, device, **layout):
    group = make_group(sizes, device=device, **layout)
    binding = PackedBinding(group, STORAGES[storage])
    binding.rest(fill(group, values))
    return binding


def check(kernels, storage, sizes, values, **layout):
    """Kernels, torch on the GPU and torch on the CPU give the same bytes."""
    wanted = packed(storage, sizes, values, "cpu", **layout)
    for on in (True, False):
        kernels(on)
        ours = packed(storage, sizes, values, "cuda", **layout)
        assert (ours.kernels is not None) == on
        codes = ours.packed.codes.view(torch.uint8).cpu()
        assert torch.equal(codes, wanted.packed.codes.view(torch.uint8))
        assert torch.equal(ours.packed.exponents.cpu(), wanted.packed.exponents)
        assert torch.equal(ours.lift().cpu(), wanted.lift())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", NARROW)
def test_groups_of_slots(kernels, storage, kind, layout):
    check(kernels, storage, SIZES, [draw(kind, size) for size in SIZES], **LAYOUTS[layout])


@pytest.mark.parametrize("kind", ["random", "wide", "edges"])
@pytest.mark.parametrize("storage", NARROW)
def test_large_groups(kernels, storage, kind):
    check(kernels, storage, LARGE, [draw(kind, size) for size in LARGE])


@pytest.mark.parametrize("storage", NARROW)
def test_nothing_happens_unless_the_flag_is_up(storage):
    binding = packed(storage, LARGE, [draw("random", size) for size in LARGE], "cuda")
    held = binding.lift()
    down = torch.zeros((), dtype=torch.bool, device="cuda")
    binding.rest(-held, down)
    assert torch.equal(binding.lift(), held)
    binding.rest(-held, ~down)
    assert torch.equal(binding.lift(~down), -held)


def test_the_working_buffer_outlives_a_side_stream():
    """It is let go on the host long before the side stream has packed it."""
    values = [draw("random", size) for size in LARGE]
    binding = packed("int8", LARGE, values, "cuda")
    wanted, flat = binding.lift(), binding.lift()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        binding.rest(flat)
    numel = flat.numel()
    del flat
    torch.full((numel,), 7.0, device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(binding.lift(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", NARROW)
def test_steps_of_a_method(kernels, storage, dtype):
    kernels(True)
    ours = take_steps(storage, dtype, "cuda")
    kernels(False)
    theirs = take_steps(storage, dtype, "cuda")
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
