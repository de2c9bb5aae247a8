"""What holds for every low-rank step: nothing lost, nothing poisoned, nothing dead."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.lowrank.ranks import Ranks, describe, random_gradients
from thinwire.layout import SlotKind
from thinwire.lowrank.basis import cholesky_orthogonalise, name_hash, orthogonalise
from thinwire.lowrank.batches import find_runs
from thinwire.lowrank.layout import make_pile
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.powersgd import PowerSGD

F32, F64 = torch.float32, torch.float64
INFOS = [
    describe("w1", (24, 40), F32),
    describe("w2", (24, 40), F32),
    describe("conv", (16, 4, 3, 3), F32, strides=(36, 1, 12, 4)),
    describe("experts", (3, 12, 10), F32, kind=SlotKind.OTHER),
    describe("odd", (33, 17), F32),
]
METHODS = [
    PowerSGD(rank=4, dense_fallback=False),
    PowerSGD(rank=1, dense_fallback=False),
    PowerSGD(rank=3, subspace_refresh_every=3, dense_fallback=False),
    PowerSGD(rank=4, wire="bf16", dense_fallback=False),
    ACPSGD(rank=4, dense_fallback=False),
    ACPSGD(rank=1, dense_fallback=False),
    ACPSGD(rank=4, wire="bf16", dense_fallback=False),
]
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


@pytest.mark.parametrize(
    ("world", "deterministic"), [(1, False), (2, False), (3, True), (5, False)]
)
@each_method
def test_nothing_is_lost(method, world, deterministic):
    ranks = Ranks(method, INFOS, world, deterministic)
    for step in range(7):
        _, outcome = ranks.step(random_gradients(INFOS, world, step))
        held = [one.account.c for one in ranks.opened]
        for c, accepted, residual in zip(ranks.c, ranks.accepted, held, strict=True):
            # One ulp of the larger one, where the terms of the product do not cancel; r terms may.
            scale = torch.maximum(c.abs(), accepted.abs())
            assert ((accepted + residual - c).abs() <= 4 * 1.2e-7 * (scale + c.abs().mean())).all()
        total = sum(c.double() for c in ranks.c)
        found = world * outcome.update.double() + sum(r.double() for r in held)
        assert (found - total).abs().sum() <= 1e-6 * total.abs().sum()


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_telescoping_sums(method):
    infos = [describe("w", (20, 30), F64), describe("v", (20, 30), F64)]
    ranks = Ranks(method(rank=2, dense_fallback=False), infos, 3)
    sent = {info.name: torch.zeros(info.shape, dtype=F64) for info in infos}
    given = {info.name: torch.zeros(info.shape, dtype=F64) for info in infos}
    for step in range(40):
        gradients = random_gradients(infos, 3, step)
        update, _ = ranks.step(gradients)
        for name in sent:
            sent[name] += update[name]
            given[name] += sum(g[name] for g in gradients) / 3
    for name in sent:
        waiting = sum(ranks.residual(rank, name) for rank in range(3)) / 3
        assert torch.allclose(sent[name] + waiting, given[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_low_rank_gradients_are_recovered_after_a_warm_start(method):
    """PowerSGD then loses nothing in any step.

    ACP-SGD loses nothing in every second one: the basis it starts from spans the columns (or rows) of everything it
    holds back, while the other basis still remembers what the last step held back.
    """
    infos = [describe("w", (18, 25), F64)]
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=F64)

    left, right = normal(18, 3), normal(25, 3)
    ranks = Ranks(method(rank=3, dense_fallback=False), infos, 2)
    sent, given = torch.zeros(18, 25, dtype=F64), torch.zeros(18, 25, dtype=F64)
    for step in range(10):
        gradients = [{"w": left @ normal(3, 3) @ right.T} for _ in range(2)]
        update, _ = ranks.step(gradients)
        sent += update["w"]
        given += sum(g["w"] for g in gradients) / 2
        if step % 2 == 1 or (method is PowerSGD and step):
            assert torch.allclose(sent, given, rtol=0, atol=1e-9)
            assert max(ranks.residual(rank, "w").abs().max() for rank in range(2)) < 1e-9


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_full_rank_loses_nothing(shape):
    infos = [describe("w", shape, F64)]
    two_phase = Ranks(PowerSGD(rank=9, dense_fallback=False), infos, 3)
    alternating = Ranks(ACPSGD(rank=9, dense_fallback=False), infos, 3)
    for step in range(4):
        gradients = random_gradients(infos, 3, step)
        mean = sum(g["w"] for g in gradients) / 3
        update, _ = two_phase.step(gradients)
        assert torch.allclose(update["w"], mean, rtol=0, atol=1e-10)
        alternating.step(gradients)
        side = alternating.compressors[0].mode("w", step)
        # A square basis loses nothing, and the longer factor is sent with a square basis.
        if shape[0 if side == "p" else 1] == max(shape):
            assert alternating.residual(0, "w").abs().max() < 1e-10


@each_method
def test_a_layer_whose_first_gradient_is_zero_revives(method, world=2):
    infos = [describe("w", (24, 40), F32), describe("busy", (24, 40), F32)]
    ranks = Ranks(method, infos, world)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 1, generator=generator) for n in (24, 40))
    for step in range(12):
        gradients = random_gradients(infos, world, step)
        for one in gradients:
            one["w"] = torch.zeros(24, 40) if step < 2 else left @ right.T
        update, _ = ranks.step(gradients)
        assert torch.isfinite(update["w"]).all()
        if step < 2:
            assert not update["w"].any()
    wanted = left @ right.T
    # What was held back on the way comes on top, so ask for the direction.
    cosine = (update["w"] * wanted).sum() / update["w"].norm() / wanted.norm()
    assert cosine > 0.99


@pytest.mark.parametrize("how", [orthogonalise, cholesky_orthogonalise])
def test_dead_columns_are_replaced_and_the_rest_kept(how):
    factor = torch.randn(3, 20, 4)
    factor[0, :, 2] = 0
    factor[1, :, 0] = float("nan")
    factor[2] *= 1e-30
    basis = how(factor, torch.randn(3, 20, 4))
    assert torch.allclose(basis.mT @ basis, torch.eye(4).expand(3, 4, 4), atol=1e-5)
    alive = factor[0, :, [0, 1, 3]]
    assert torch.allclose(basis[0] @ (basis[0].T @ alive), alive, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("dependent", [False, True])
def test_the_accelerators_bases_span_the_same(rank, dependent):
    """Padded to one length, by Cholesky factors, against QR matrix by matrix."""
    shapes = [(2, 40, rank), (1, 100, rank), (3, 25, rank)]
    generator = torch.Generator().manual_seed(rank)
    factors = [torch.randn(shape, generator=generator) for shape in shapes]
    spares = [torch.randn(shape, generator=generator) for shape in shapes]
    if dependent and rank > 1:
        for factor in factors:
            factor[:, :, 1] = 3 * factor[:, :, 0]
    pile = make_pile([0, 1, 2], shapes, spares)
    found = pile.unstack(cholesky_orthogonalise(pile.stack(factors), pile.spares))
    for factor, basis in zip(factors, found, strict=True):
        eye = torch.eye(rank).expand(len(basis), rank, rank)
        assert torch.allclose(basis.mT @ basis, eye, atol=1e-6)
        assert torch.allclose(basis @ (basis.mT @ factor), factor, atol=2e-5)


@pytest.mark.parametrize("how", [orthogonalise, cholesky_orthogonalise])
def test_a_single_column_is_normalised_per_matrix(how):
    factor = torch.tensor([1e-25, 1.0, 1e25]).view(3, 1, 1) * torch.randn(3, 50, 1)
    norms = how(factor, factor).norm(dim=1)
    assert torch.allclose(norms, torch.ones(3, 1), atol=1e-6)


@each_method
def test_a_bad_step_leaves_every_bit(method, world=3):
    ranks = Ranks(method, INFOS, world)
    for step in range(3):
        ranks.step(random_gradients(INFOS, world, step))
    names = [info.name for info in INFOS]
    before = ranks.compressors[0].state_dict(names)
    gradients = random_gradients(INFOS, world, 3)
    gradients[1]["conv"][0, 0, 0, 0] = float("inf")
    _, outcome = ranks.step(gradients)
    assert bool(outcome.non_finite)
    for one, c in zip(ranks.opened, ranks.c, strict=True):
        assert torch.equal(one.account.c, c)
    after = ranks.compressors[0].state_dict(names)
    for name, side in itertools.product(names, before["w1"]):
        assert torch.equal(before[name][side], after[name][side])
    _, outcome = ranks.step(random_gradients(INFOS, world, 4))
    assert not bool(outcome.non_finite)


@each_method
def test_a_step_can_be_discarded_after_memory_was_read(method, world=2):
    ranks = Ranks(method, INFOS, world)
    ranks.step(random_gradients(INFOS, world, 0))
    names = [info.name for info in INFOS]
    before = ranks.compressors[1].state_dict(names)
    ranks.step(random_gradients(INFOS, world, 1))
    for one, c in zip(ranks.opened, ranks.c, strict=True):
        one.account.settle(torch.tensor(True))
        assert torch.allclose(one.account.c, c, rtol=0, atol=4e-6)
    after = ranks.compressors[1].state_dict(names)
    for name, side in itertools.product(names, before["w1"]):
        assert torch.equal(before[name][side], after[name][side])


@pytest.mark.parametrize("method", [PowerSGD(rank=2), ACPSGD(rank=2)], ids=str)
def test_an_overflow_is_a_bad_step_and_does_not_stay(method, world=2):
    infos = [describe("w", (24, 40), F32)]
    ranks = Ranks(method, infos, world)
    huge = [{"w": torch.full((24, 40), 3e38)} for _ in range(world)]
    ranks.step(huge)
    _, outcome = ranks.step(huge)
    assert bool(outcome.non_finite)
    assert all(torch.isfinite(ranks.residual(rank, "w")).all() for rank in range(world))


@each_method
def test_an_unused_parameter_keeps_what_it_holds(method, world=3):
    ranks = Ranks(method, INFOS, world)
    for step in range(4):
        ranks.step(random_gradients(INFOS, world, step))
    held = [ranks.residual(rank, "w1") for rank in range(world)]
    basis = ranks.compressors[0].state_dict(["w1"])["w1"]
    gradients = random_gradients(INFOS, world, 4)
    for one in gradients:
        one["w1"].zero_()
    update, _ = ranks.step(gradients)
    assert not update["w1"].any()
    for rank in range(world):
        assert torch.equal(ranks.residual(rank, "w1"), held[rank])
    for side, kept in ranks.compressors[0].state_dict(["w1"])["w1"].items():
        assert torch.equal(kept, basis[side])
    # Used on one rank only is used.
    gradients = random_gradients(INFOS, world, 5)
    gradients[0]["w1"].zero_()
    update, _ = ranks.step(gradients)
    assert update["w1"].any()


@pytest.mark.parametrize("method", [PowerSGD(rank=4), ACPSGD(rank=4), ACPSGD(rank=1)], ids=str)
def test_another_bucketing_gives_the_same_bits_when_deterministic(method, world=3):
    setting = replace(method, dense_fallback=False)
    whole = Ranks(setting, INFOS, world, deterministic=True)
    parts = [Ranks(setting, part, world, deterministic=True) for part in (INFOS[:2], INFOS[2:])]
    for step in range(8):
        if step == 4:
            whole.regroup(INFOS[::-1])
        gradients = random_gradients(INFOS, world, step)
        update, _ = whole.step(gradients)
        for part in parts:
            own, _ = part.step(gradients)
            for name, values in own.items():
                assert torch.equal(values, update[name])


def test_bytes_are_what_the_formula_says():
    infos = [
        describe("a", (64, 48), F32),
        describe("b", (64, 48), F32),
        describe("c", (32, 96), F32),
    ]
    world, rank, flags = 4, 3, 3 + 1
    long, short = {"p": 64, "q": 48}, {"p": 32, "q": 96}
    share = 2 * (world - 1) / world
    for wire, itemsize in (("fp32", 4), ("bf16", 2)):
        two_phase = Ranks(PowerSGD(rank=rank, wire=wire), infos, world)
        alternating = Ranks(ACPSGD(rank=rank, wire=wire), infos, world)
        sent = 0
        for step in range(4):
            gradients = random_gradients(infos, world, step)
            two_phase.step(gradients)
            alternating.step(gradients)
            modes = [alternating.compressors[0].mode(i.name, step) for i in infos]
            sent += rank * (long[modes[0]] + long[modes[1]] + short[modes[2]]) + flags
            values = alternating.numbers
            assert values == rank * (long[modes[0]] + long[modes[1]] + short[modes[2]])
            exact = alternating.expected
            assert exact == pytest.approx(share * itemsize * (values + flags))
        both = rank * (3 * (64 + 48) - (64 + 48) + 32 + 96)
        # Integer division and the padding of pieces to a common size.
        slack = 4 * 2 * 2 * world * itemsize
        assert two_phase.ledger.sent_bytes() == pytest.approx(
            4 * share * itemsize * (both + flags), abs=slack
        )
        assert alternating.ledger.sent_bytes() == pytest.approx(share * itemsize * sent, abs=slack)
        if wire == "fp32":
            assert alternating.ledger.messages() == 4
            assert two_phase.ledger.messages() == 8


def test_traffic_of_acpsgd_is_even():
    """Parameters with long left factors do not all send them in the same step."""
    infos = [describe(f"layer.{n}.weight", (400, 20), F32) for n in range(64)]
    compressor = ACPSGD(rank=2).compressor()
    per_step = [
        sum(400 if compressor.mode(info.name, step) == "p" else 20 for info in infos)
        for step in range(4)
    ]
    assert max(per_step) < 1.5 * min(per_step)
    assert per_step[0] + per_step[1] == 64 * 420


def test_refresh_forgets_the_old_subspace():
    setting = PowerSGD(rank=2, subspace_refresh_every=5, dense_fallback=False)
    compressor = setting.compressor()
    turn = next(count for count in range(9) if compressor.mode("w", count))
    assert turn == 5
    infos = [describe("w", (30, 30), F64)]
    ranks = Ranks(setting, infos, 2)
    torch.manual_seed(0)
    left, right = torch.randn(30, 2, dtype=F64), torch.randn(30, 2, dtype=F64)
    for step in range(turn + 1):
        gradients = random_gradients(infos, 2, step)
        if step == turn:
            held = [ranks.residual(rank, "w") for rank in range(2)]
            gradients = [{"w": left @ right.T - e} for e in held]
        update, _ = ranks.step(gradients)
    assert torch.allclose(update["w"], left @ right.T, rtol=0, atol=1e-8)


def test_state_of_another_rank_setting_starts_anew():
    infos = [describe("w", (24, 40), F32)]
    old, new = Ranks(ACPSGD(rank=4), infos, 1), Ranks(ACPSGD(rank=2), infos, 1)
    old.step(random_gradients(infos, 1, 0))
    fresh = new.compressors[0].state_dict(["w"])["w"]
    new.compressors[0].load_state_dict(old.compressors[0].state_dict(["w"]))
    for side, basis in new.compressors[0].state_dict(["w"])["w"].items():
        assert torch.equal(basis, fresh[side])


def test_first_bases_depend_on_the_name_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    infos = [describe("w", (24, 40), F32), describe("v", (24, 40), F32)]
    one = Ranks(ACPSGD(rank=4), infos, 1).compressors[0].state_dict(["w", "v"])
    other = Ranks(ACPSGD(rank=4), infos[::-1], 1).compressors[0].state_dict(["w"])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one["w"]["q"], other["w"]["q"])
    assert not torch.equal(one["w"]["q"], one["v"]["q"])
    assert name_hash("w") == 0x50E721E49C013F00 >> 1


def test_runs_of_equal_steps():
    found = [(run.first, run.step, run.count) for run in find_runs([0, 8, 16, 40, 64, 70])]
    assert found == [(0, 8, 3), (40, 24, 2), (70, 1, 1)]


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_low_precision_products_are_not_used(chosen):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(chosen)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            test_nothing_is_lost(METHODS[0], 2, False)
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision(before)
