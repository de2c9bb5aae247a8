"""Both methods against their papers' recursions, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.lowrank.ranks import Ranks, describe, random_gradients
from thinwire.layout import SlotKind
from thinwire.lowrank.basis import name_hash
from thinwire.lowrank.matrices import matrices_of
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.reference import AlternatingReference, TwoPhaseReference
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.powersgd import PowerSGD

F64 = torch.float64
INFOS = [
    describe("a", (12, 20), F64),
    describe("b", (12, 20), F64),
    describe("conv", (6, 3, 3, 3), F64),
    describe("tall", (40, 7), F64),
    describe("c", (12, 20), F64),
]


def first_factor(name: str, side: str, info, rank: int) -> Tensor:
    shape = matrices_of(info.slot(0))
    return LowRankMemory(rank).draw(name, side, shape, F64)[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_the_two_phase_recursion(rank, world, deterministic):
    ranks = Ranks(PowerSGD(rank=rank, dense_fallback=False), INFOS, world, deterministic)
    references = {
        info.name: TwoPhaseReference(
            first_factor(info.name, "q", info, rank),
            world,
            (info.shape[0], info.numel // info.shape[0]),
        )
        for info in INFOS
    }
    for step in range(12):
        gradients = random_gradients(INFOS, world, step)
        update, _ = ranks.step(gradients)
        for info in INFOS:
            rows = [g[info.name].reshape(info.shape[0], -1) for g in gradients]
            expected = references[info.name].step(rows)
            assert torch.allclose(
                update[info.name].reshape(expected.shape), expected, rtol=0, atol=1e-10
            )
            for rank_number in range(world):
                held = ranks.residual(rank_number, info.name).reshape(expected.shape)
                wanted = references[info.name].residuals[rank_number]
                assert torch.allclose(held, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_acpsgd_is_the_alternating_recursion(rank):
    world = 3
    ranks = Ranks(ACPSGD(rank=rank, dense_fallback=False), INFOS, world)
    compressor = ranks.compressors[0]
    references = {
        info.name: AlternatingReference(
            first_factor(info.name, "p", info, rank),
            first_factor(info.name, "q", info, rank),
            world,
            (info.shape[0], info.numel // info.shape[0]),
        )
        for info in INFOS
    }
    for step in range(15):
        gradients = random_gradients(INFOS, world, step)
        update, _ = ranks.step(gradients)
        for info in INFOS:
            rows = [g[info.name].reshape(info.shape[0], -1) for g in gradients]
            expected = references[info.name].step(rows, compressor.mode(info.name, step))
            got = update[info.name].reshape(expected.shape)
            assert torch.allclose(got, expected, rtol=0, atol=1e-11)


class EpfmlPowerSGD:
    """epfml's BasicPowerSGD with one iteration per step, re-computed: gradients accumulate what was not sent."""

    def __init__(self, p: Tensor, q: Tensor, world: int) -> None:
        self.p, self.q = p.clone(), q.clone()
        self.buffers: list[Tensor] = [p.new_zeros(p.shape[0], q.shape[0]) for _ in range(world)]
        self.step_counter = 0

    def aggregate(self, gradients: list[Tensor]) -> Tensor:
        even = self.step_counter % 2 == 0
        into = torch.linalg.qr(self.p if even else self.q).Q
        out = into.new_zeros((self.q if even else self.p).shape)
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            buffer += gradient
            local = (buffer.T if even else buffer) @ into
            buffer -= into @ local.T if even else local @ into.T
            out += local / len(gradients)
        if even:
            self.p, self.q = into, out
        else:
            self.p, self.q = out, into
        self.step_counter += 1
        return self.p @ self.q.T


@pytest.mark.parametrize("rank", [2, 4])
def test_acpsgd_is_epfmls_recursion(rank):
    world = 4
    # The oracle sends Q first; these names start there too.
    names = [name for name in map(str, range(40)) if name_hash(name) % 2 == 1][:5]
    sizes = [(16, 24), (16, 24), (30, 11), (9, 9), (16, 24)]
    infos = [describe(name, size, F64) for name, size in zip(names, sizes, strict=True)]
    ranks = Ranks(ACPSGD(rank=rank, dense_fallback=False), infos, world)
    oracles = {
        info.name: EpfmlPowerSGD(
            first_factor(info.name, "p", info, rank),
            first_factor(info.name, "q", info, rank),
            world,
        )
        for info in infos
    }
    for step in range(15):
        gradients = random_gradients(infos, world, step)
        update, _ = ranks.step(gradients)
        for name, oracle in oracles.items():
            expected = oracle.aggregate([g[name] for g in gradients])
            assert torch.allclose(update[name], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_experts_are_a_batch_of_matrices(method):
    """A 3-D weight gives what its matrices give one by one, from the same first bases."""
    stacked = describe("experts", (3, 10, 14), F64, kind=SlotKind.OTHER)
    setting = method(rank=2, dense_fallback=False)
    together = Ranks(setting, [stacked], 2)
    singles = []
    for number in range(3):
        alone = Ranks(setting, [describe("experts", (10, 14), F64)], 2)
        for compressor in alone.compressors:
            state = together.compressors[0].state_dict(["experts"])["experts"]
            part = {side: basis[number : number + 1] for side, basis in state.items()}
            compressor.load_state_dict({"experts": part})
        singles.append(alone)
    for step in range(6):
        gradients = random_gradients([stacked], 2, step)
        update, _ = together.step(gradients)
        for number, alone in enumerate(singles):
            own, _ = alone.step([{"experts": g["experts"][number]} for g in gradients])
            assert torch.allclose(update["experts"][number], own["experts"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_memory_format_does_not_matter(method):
    shape = (8, 6, 3, 3)
    plain = describe("conv", shape, F64)
    last = describe("conv", shape, F64, strides=(54, 1, 18, 6))
    turned = describe("conv", shape, F64, strides=(1, 8 * 9, 24, 8))
    setting = method(rank=2, dense_fallback=False)
    ranks = [Ranks(setting, [info], 3) for info in (plain, last, turned)]
    for step in range(6):
        gradients = random_gradients([plain], 3, step)
        updates = [one.step(gradients)[0]["conv"] for one in ranks]
        assert torch.allclose(updates[0], updates[1], rtol=0, atol=1e-12)
        assert torch.allclose(updates[0], updates[2], rtol=0, atol=1e-12)
    saved = [one.compressors[0].state_dict(["conv"])["conv"]["q"] for one in ranks]
    signs = (saved[0] * saved[1]).sum(1, keepdim=True).sign()
    assert torch.allclose(saved[0], saved[1] * signs, rtol=0, atol=1e-10)
