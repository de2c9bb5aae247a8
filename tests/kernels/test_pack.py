"""The packing kernels, run on the CPU, give the bits of the torch reference, whatever the layout."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.cpu_compiler import CpuToolchain, needs_compiler
from tests.memory.test_storage import KINDS, NARROW, SIZES, draw, fill, make_group
from thinwire.kernels.cuda.pack import PIECE, Piece, cut_slots
from thinwire.kernels.cuda.structs import read_column
from thinwire.memory.storage import PROBED_SIZES, STORAGES, PackedBinding

pytestmark = [needs_compiler, pytest.mark.timeout(300)]

LAYOUTS = {
    "a bucket's": {},
    "gaps": {"gap": 8},
    "no alignment": {"gap": 3, "alignment": 1},
}


def compare(kernels, storage, group, values):
    """Pack and unpack with and without kernels; every byte must agree."""
    flat = fill(group, values)
    bindings = []
    for on in (True, False):
        kernels(on)
        bindings.append(PackedBinding(group, STORAGES[storage]))
        bindings[-1].rest(flat)
    ours, theirs = bindings
    assert torch.equal(ours.packed.codes.view(torch.uint8), theirs.packed.codes.view(torch.uint8))
    assert torch.equal(ours.packed.exponents, theirs.packed.exponents)
    lifted, wanted = ours.lift(), theirs.lift()
    assert torch.equal(lifted.view(torch.int32), wanted.view(torch.int32))
    return ours


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", NARROW)
def test_groups_of_slots(kernels, storage, kind, layout):
    group = make_group(SIZES, **LAYOUTS[layout])
    compare(kernels, storage, group, [draw(kind, size) for size in SIZES])


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, PIECE, 3 * PIECE + 130])
@pytest.mark.parametrize("storage", NARROW)
def test_single_slots(kernels, storage, size):
    compare(kernels, storage, make_group([size]), [draw("random", size)])


@pytest.mark.parametrize("storage", NARROW)
def test_random_bits(kernels, storage):
    bits = torch.randint(-(2**31), 2**31, (5000,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.where(x.isnan(), 1.0, x)
    compare(kernels, storage, make_group([5000]), [x])


@pytest.mark.parametrize("storage", NARROW)
def test_nothing_happens_unless_the_flag_is_up(kernels, storage):
    group = make_group(SIZES, gap=3)
    values = [draw("random", size) for size in SIZES]
    binding = compare(kernels, storage, group, values)
    held, marked = binding.lift(), torch.full((group.numel,), 7.0)
    down, up = torch.tensor(False), torch.tensor(True)
    assert binding.kernels is not None
    binding.kernels.unpack(binding.packed.codes, binding.packed.exponents, marked, down)
    assert (marked == 7.0).all()
    binding.rest(marked, down)
    assert torch.equal(binding.lift(up), held)
    binding.rest(-held, up)
    assert torch.equal(binding.lift(), -held)


def test_more_pieces_than_blocks_that_look(kernels):
    kernels.tune(look_blocks=2)
    group = make_group([2 * PIECE + 5, 3 * PIECE])
    values = [draw("random", slot.numel) for slot in group.slots]
    held = compare(kernels, "int8", group, values).lift()
    kernels(True)
    again, up = PackedBinding(group, STORAGES["int8"]), torch.tensor(True)
    again.rest(fill(group, values), up)
    assert torch.equal(again.lift(up), held)


def test_a_float64_group_is_packed_by_torch(kernels):
    binding = PackedBinding(make_group([5], dtype=torch.float64), STORAGES["int8"])
    assert binding.kernels is None and binding.lift().dtype == torch.float64


def test_pieces_cover_every_element_once():
    group = make_group([5000, 0, 3, 129], gap=2)
    seen = torch.zeros(group.numel, dtype=torch.int64)
    pieces = cut_slots(group)
    starts, counts, gaps = (read_column(Piece, pieces, name) for name in ("at", "count", "gap"))
    for start, size in zip(starts, counts + gaps, strict=True):
        seen[start : start + size] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", NARROW)
def test_steps_of_a_method(kernels, storage, dtype):
    kernels(True)
    ours = take_steps(storage, dtype)
    kernels(False)
    theirs = take_steps(storage, dtype)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def take_steps(storage, dtype, device="cpu"):
    """Updates and residuals of two good steps, a bad one and a discarded one, through a method's own parts."""
    method = tw.TopK(density=0.05, memory=tw.memory.Residual(storage=storage), dense_fallback=False)
    cluster = Cluster(
        2, method, shapes={"w": (40, 33), "v": (131,)}, dtype=dtype, device=torch.device(device)
    )
    results = []
    for step in range(4):
        gradients = cluster.random(step)
        if step == 2:
            gradients[1]["w"][0, 0] = torch.inf
        updates = cluster.step(gradients)
        if step == 3:
            for reducer in cluster.reducers:
                reducer.settle(discard=True)
        residuals = [cluster.residuals(rank) for rank in range(2)]
        results += [one[name].nan_to_num(7e7) for one in updates + residuals for name in one]
    return results


def test_kernels_that_disagree_with_torch_are_not_used(kernels, caplog):
    def spoil(name, kernel):
        def launch(blocks, threads, args):
            kernel(blocks, threads, args)
            if name == "pack_slots":
                _, codes, *_ = args
                codes[PROBED_SIZES[0]] += 1

        return launch

    kernels.use(CpuToolchain(wrap=spoil))
    assert PackedBinding(make_group([300, 1]), STORAGES["int8"]).kernels is None
    assert "give other bits than torch" in caplog.text
