"""Narrow storages: idempotent, unbiased, within the stated loss, and the bytes they promise."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, parameter, same_bits
from thinwire.errors import UsageError
from thinwire.layout import Group
from thinwire.memory.residual import Residual
from thinwire.memory.storage import (
    STORAGES,
    PackedBinding,
    StorageBlocks,
    make_store,
    pack_spans,
)

LOSS = {"bf16": 0.0035, "int8": 0.014}
"""Largest relative L2 error of one packing of normal data, as docs/methods.md states it."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 1 / 128}
NARROW = list(LOSS)
SIZES = (300, 1, 0, 127, 128, 129, 1000, 5)


def make_group(sizes, *, gap=0, alignment=4, dtype=torch.float32, device="cpu"):
    """Slots of these sizes, aligned as in a bucket's group or not, `gap` more elements before, between and behind them."""
    slots, offset = [], gap
    for number, size in enumerate(sizes):
        slots.append(parameter(f"slot{number}", (size,)).slot(offset))
        offset += -(-size // alignment) * alignment + gap
    return Group(tuple(slots), tuple(slots), offset, dtype, torch.device(device))


def fill(group, values):
    flat = torch.zeros(group.numel, dtype=group.dtype, device=group.device)
    for slot, one in zip(group.slots, values, strict=True):
        slot.span(flat).copy_(one)
    return flat


def repack(storage, x):
    group = make_group([x.numel()], dtype=x.dtype)
    binding = make_store(storage).make_binding(group)
    binding.rest(fill(group, [x]))
    return group.slots[0].span(binding.lift())


def define(storage, x):
    """What packing makes of one slot, element by element as the format is defined."""
    limit = torch.finfo(torch.bfloat16).max if storage == "bf16" else 127 * 2.0**121
    x = torch.where(x.isfinite(), x.float().clamp(-limit, limit), 0.0)
    bits = x.view(torch.int32)
    mixed = bits * -1640531527 + torch.arange(x.numel(), dtype=torch.int32) * 668265263
    mixed = (mixed ^ (mixed >> 15)) * -2048144789
    noise = ((mixed ^ (mixed >> 13)) >> 7) & 0xFFFF
    if storage == "bf16":
        return ((bits + noise) & ~0xFFFF).view(torch.float32)
    blocks = []
    for values, noises in zip(x.split(128), noise.split(128), strict=True):
        if not values.numel():
            continue
        fraction, exponent = torch.frexp(values.abs().max() / 127)
        exponent = (exponent - (fraction == 0.5).int()).clamp(-126, 127)
        codes = (torch.ldexp(values, -exponent) + noises * 2.0**-16).floor().clamp(-127, 127)
        blocks.append(torch.ldexp(codes, exponent))
    return torch.cat(blocks) if blocks else x


def draw(kind, size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator)
    match kind:
        case "zeros":
            return torch.zeros(size)
        case "tiny":
            return x * 1e-41
        case "huge":
            return (x * 3e38).clamp(-3.4e38, 3.4e38)
        case "overflown":
            return torch.where(x > 1.0, torch.inf, torch.where(x < -1.0, -torch.inf, x))
        case "wide":
            return (
                x * torch.randint(-140, 127, (size,), generator=generator).double().exp2().float()
            )
        case "edges":
            # Around what a code can just hold, where the exponent changes.
            steps = torch.randint(-1, 2, (size,), dtype=torch.int32, generator=generator)
            return (torch.full((size,), 127.0 * 2.0**-9).view(torch.int32) + steps).view(
                torch.float32
            )
    return x


KINDS = ["random", "zeros", "tiny", "huge", "overflown", "wide", "edges"]


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", NARROW)
def test_every_slot_is_packed_as_if_alone(storage, kind, gap):
    group = make_group(SIZES, gap=gap, alignment=1 if gap else 4)
    values = [draw(kind, size) for size in SIZES]
    flat = fill(group, values)
    binding = make_store(storage).make_binding(group)
    binding.rest(flat)
    expected = [define(storage, one) for one in values]
    assert torch.equal(binding.lift(), fill(group, expected))
    other = make_store(storage).make_binding(group)
    for slot, one, wanted in zip(group.slots, values, expected, strict=True):
        assert torch.equal(binding.read(slot), wanted)
        other.put(slot, one)
    assert torch.equal(other.packed.codes, binding.packed.codes)
    assert torch.equal(other.packed.exponents, binding.packed.exponents)


@pytest.mark.parametrize("storage", NARROW)
def test_it_does_not_matter_how_many_blocks_are_packed_at_a_time(storage):
    group, packing = make_group(SIZES), STORAGES[storage]
    spans = group.spans(fill(group, [draw("wide", size) for size in SIZES]))
    blocks = StorageBlocks(SIZES, group.device)
    found = []
    for at_a_time in (3, blocks.total):
        codes = torch.zeros(group.numel, dtype=packing.codes)
        exponents = torch.zeros(blocks.total, dtype=torch.int8)
        pack_spans(packing, blocks, spans, group.spans(codes), exponents, at_a_time)
        found.append((codes, exponents))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("storage", NARROW)
def test_a_new_memory_is_zero_and_a_group_may_be_empty(storage):
    binding = make_store(storage).make_binding(make_group(SIZES, gap=2))
    assert not binding.lift().any()
    empty = PackedBinding(make_group([]), STORAGES[storage])
    empty.rest(empty.lift())
    assert empty.nbytes() == 0


@pytest.mark.parametrize("storage", NARROW)
def test_float64_is_packed_like_float32(storage):
    x = torch.randn(1000, dtype=torch.float64)
    assert torch.equal(repack(storage, x).float(), repack(storage, x.float()))


@pytest.mark.parametrize("storage", NARROW)
def test_packing_what_was_unpacked_changes_nothing(storage):
    for x in (torch.randn(10_001), torch.randn(5), 1e-30 * torch.randn(300), torch.zeros(130)):
        once = repack(storage, x)
        assert same_bits(repack(storage, once), once)


@pytest.mark.parametrize("storage", NARROW)
def test_loss_of_one_packing(storage):
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    error = (repack(storage, x) - x).norm() / x.norm()
    assert 0 < error <= LOSS[storage]
    assert abs((repack(storage, x) - x).mean()) < 1e-4


@pytest.mark.parametrize("storage", NARROW)
def test_extreme_values_stay_finite(storage):
    x = torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, 1.0])
    assert repack(storage, x).isfinite().all()


@pytest.mark.parametrize("storage", NARROW)
def test_small_gradients_add_up_in_the_mean(storage):
    """Round-to-nearest would lose every one of them: they are below half a step of what is held."""
    generator = torch.Generator().manual_seed(0)
    held = torch.ones(20_000)
    added = torch.zeros(20_000)
    for _ in range(50):
        g = 1e-4 * (1 + torch.rand(20_000, generator=generator))
        added += g
        held = repack(storage, held + g)
    assert abs((held - 1).mean() / added.mean() - 1) < 0.2


@pytest.mark.parametrize("storage", BYTES)
def test_bytes_are_what_the_format_says(storage):
    method = tw.TopK(density=0.01, memory=Residual(storage=storage), dense_fallback=False)
    cluster = Cluster(2, method, shapes={"w": (256, 128), "v": (128, 128)})
    cluster.step(cluster.random(0))
    cluster.reducers[0].settle()
    held = sum(memory.nbytes() for memory in cluster.reducers[0].assignments.memories())
    assert held == BYTES[storage] * (256 + 128) * 128


@pytest.mark.parametrize("storage", NARROW)
def test_residual_loses_no_more_than_one_packing_per_step(storage):
    method = tw.TopK(density=0.05, memory=Residual(storage=storage), dense_fallback=False)
    cluster = Cluster(3, method, shapes={"w": (40, 50)})
    for step in range(5):
        before = [cluster.residuals(r)["w"] for r in range(3)]
        gradients = cluster.random(step)
        if step == 3:
            gradients[0]["w"][0, 0] = torch.inf
        update = cluster.step(gradients)[0]["w"]
        after = [cluster.residuals(r)["w"] for r in range(3)]
        if step == 3:
            gradients[0]["w"][0, 0] = 0
            update = torch.zeros_like(update)
        c = [before[r] + gradients[r]["w"] for r in range(3)]
        lost = 3 * update + sum(after) - sum(c)
        packings = 2 if step == 3 else 1
        assert lost.norm() <= packings * 1.3 * LOSS[storage] * torch.stack(c).norm()


@pytest.mark.parametrize("storage", NARROW)
def test_state_survives_rebucketing_and_a_round_trip(storage):
    method = tw.TopK(density=0.05, memory=Residual(storage=storage), dense_fallback=False)
    cluster = Cluster(2, method)
    cluster.step(cluster.random(0))
    held = cluster.residuals(0)
    cluster.buckets = [["head", "scalar"], ["linear"], ["bias", "conv"]]
    cluster.step([{n: torch.zeros_like(g) for n, g in rank.items()} for rank in cluster.random(1)])
    assert all(same_bits(cluster.residuals(0)[n], held[n]) for n in held)
    other = Cluster(2, method)
    for rank in range(2):
        other.reducers[rank].load_state_dict(cluster.reducers[rank].state_dict())
    for step in range(2, 5):
        ours, theirs = cluster.step(cluster.random(step)), other.step(other.random(step))
        assert all(same_bits(ours[0][n], theirs[0][n]) for n in held)


def test_flush_of_a_packed_residual_waits_and_then_sends_everything():
    method = tw.TopK(density=0.05, memory=Residual(storage="int8"), dense_fallback=False)
    cluster = Cluster(2, method)
    cluster.step(cluster.random(0))
    held = [cluster.residuals(rank)["linear"] for rank in range(2)]
    cluster.switch(tw.Dense())
    gradients = cluster.random(1)
    for rank in range(2):
        gradients[rank]["linear"].zero_()
    assert not cluster.step(gradients)[0]["linear"].any()
    assert same_bits(cluster.residuals(0)["linear"], held[0])
    gradients = cluster.random(2)
    sent = cluster.step(gradients)[0]["linear"]
    torch.testing.assert_close(sent, sum(held[r] + gradients[r]["linear"] for r in range(2)) / 2)
    assert not cluster.residuals(0)["linear"].any()


def test_loss_scale_moves_packed_residuals_exactly():
    scale = [torch.tensor(1024.0)]
    method = tw.TopK(density=0.05, memory=Residual(storage="int8"), dense_fallback=False)
    cluster = Cluster(1, method, shapes={"w": (40, 50)}, scale=lambda: scale[0])
    cluster.step(cluster.random(0, factor=1024.0))
    held = cluster.residuals(0)["w"]
    scale[0] = torch.tensor(256.0)
    cluster.step([{"w": torch.zeros(40, 50)}])
    assert same_bits(cluster.residuals(0)["w"], held)


def test_unknown_storage_is_refused():
    with pytest.raises(UsageError, match="storage"):
        Residual(storage="int4")
