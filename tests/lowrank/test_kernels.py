"""The CUDA kernels of the low-rank methods, run on the CPU: the same contracts, and what torch computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contracts.cluster import Cluster
from tests.kernels.cpu_compiler import PLAIN, CpuToolchain, needs_compiler, switch
from tests.lowrank import test_contracts as contracts
from tests.lowrank.ranks import Ranks, describe, random_gradients
from thinwire.compress import GroupStep
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Program
from thinwire.layout import SlotKind
from thinwire.lowrank.basis import orthogonalise
from thinwire.lowrank.cuda import kernels as module
from thinwire.lowrank.cuda.kernels import Kernels, make_basis_tables
from thinwire.lowrank.cuda.products import KernelSent
from thinwire.lowrank.cuda.tables import is_turned, warps_of
from thinwire.lowrank.matrices import matrices_of
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.powersgd import PowerSGD

pytestmark = [needs_compiler, pytest.mark.timeout(300)]
F32 = torch.float32
CPU = torch.device("cpu")
INFOS = [
    *contracts.INFOS,
    describe("turned", (20, 28), F32, strides=(1, 20)),
    describe("long", (300, 10), F32),
    describe("wide", (6, 1500), F32),
]
METHODS = [
    PowerSGD(rank=4, dense_fallback=False),
    PowerSGD(rank=1, wire="bf16", dense_fallback=False),
    ACPSGD(rank=4, dense_fallback=False),
    ACPSGD(rank=8, wire="bf16", dense_fallback=False),
    ACPSGD(rank=12, dense_fallback=False),
]
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


@pytest.fixture(autouse=True)
def kernels():
    """Kernels on CPU tensors."""
    with switch("cpu", PLAIN) as made:
        yield made


@each_method
@pytest.mark.parametrize(("world", "deterministic"), [(1, False), (3, True)])
def test_nothing_is_lost(method, world, deterministic):
    contracts.test_nothing_is_lost(method, world, deterministic)


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3]], ids=str)
def test_nothing_is_lost_between_hosts(method):
    contracts.test_nothing_is_lost(replace(method, per_host=2), 4, False)


@each_method
@pytest.mark.parametrize(
    "contract",
    [
        contracts.test_a_bad_step_leaves_every_bit,
        contracts.test_a_step_can_be_discarded_after_memory_was_read,
        contracts.test_an_unused_parameter_keeps_what_it_holds,
        contracts.test_a_layer_whose_first_gradient_is_zero_revives,
    ],
)
def test_the_contracts_of_a_step(contract, method):
    contract(method)


@pytest.mark.parametrize("method", [PowerSGD(rank=2), ACPSGD(rank=2)], ids=str)
def test_an_overflow_is_a_bad_step_and_does_not_stay(method):
    contracts.test_an_overflow_is_a_bad_step_and_does_not_stay(method)


@pytest.mark.parametrize("rank", [4, 12])
def test_another_bucketing_gives_the_same_bits(rank):
    contracts.test_another_bucketing_gives_the_same_bits_when_deterministic(ACPSGD(rank=rank))


@pytest.mark.parametrize("rank", [3, 8, 21])
@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
def test_steps_are_what_torch_computes(kernels, method, rank):
    """Every layout there is, a few steps, so that bases, residuals and updates have all been used again."""
    setting = method(rank=rank, dense_fallback=False)
    fast, plain = (Ranks(setting, INFOS, 2) for _ in range(2))
    for step in range(3):
        gradients = random_gradients(INFOS, 2, step)
        kernels(True)
        found, _ = fast.step(gradients)
        kernels(False)
        wanted, _ = plain.step(gradients)
        for name, values in wanted.items():
            assert torch.allclose(found[name], values, rtol=0, atol=2e-4), (name, step)
            for rank_number in range(2):
                held, other = (ranks.residual(rank_number, name) for ranks in (fast, plain))
                assert torch.allclose(held, other, rtol=0, atol=2e-4)
    assert fast.fused_steps == 6
    assert plain.fused_steps == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients(kernels, dtype):
    """The update comes in float32, so that what its cast loses can be kept."""
    infos = [describe("a", (24, 40), dtype), describe("b", (40, 16), dtype)]
    fast, plain = (Ranks(ACPSGD(rank=4, dense_fallback=False), infos, 2) for _ in range(2))
    for step in range(3):
        gradients = random_gradients(infos, 2, step)
        kernels(True)
        found, outcome = fast.step(gradients)
        assert outcome.update.dtype == torch.float32
        kernels(False)
        wanted, _ = plain.step(gradients)
        for name, values in wanted.items():
            assert torch.allclose(found[name], values, rtol=0, atol=2e-4)
    assert fast.fused_steps == 6


def run_cluster(fused: bool, method, shapes, scales, dtype):
    """Updates and residuals of every step, through the whole pipeline, beside parameters that stay dense."""
    scale = torch.ones(())
    cluster = Cluster(2, method, shapes=shapes, dtype=dtype, scale=lambda: scale)
    results = []
    with switch("cpu", PLAIN if fused else None):
        for count, value in enumerate(scales):
            scale.fill_(value)
            updates = cluster.step(cluster.random(count))
            sent = [a.sent for p in cluster.reducers for a in p.record.accounts]
            assert all(isinstance(one, KernelSent) == fused for one in sent)
            results.append((updates, [cluster.residuals(rank) for rank in range(2)]))
    return results


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("method", [PowerSGD(rank=4), ACPSGD(rank=4)], ids=str)
def test_whole_buckets_under_a_changing_scale(method, dtype):
    shapes = {"bias": (7,), "w": (40, 33), "scalar": (), "v": (24, 60), "conv": (32, 4, 3, 3)}
    results = [
        run_cluster(fused, method, shapes, (64.0, 128.0, 32.0), dtype) for fused in (True, False)
    ]
    bound = 2e-4 if dtype == F32 else 2e-2
    for (updates, held), (wanted, others) in zip(*results, strict=True):
        for rank in range(2):
            for name in shapes:
                assert torch.allclose(updates[rank][name], wanted[rank][name], rtol=0, atol=bound)
                assert torch.allclose(held[rank][name], others[rank][name], rtol=0, atol=bound)


class Launches(TorchDispatchMode):
    """Counts what would be a launch on a GPU: kernels, and operations that are neither views nor allocations."""

    FREE = ("empty", "slice", "view", "select", "as_strided")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not name.startswith(self.FREE):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "count"),
    [
        (PowerSGD(rank=4), 10),
        (ACPSGD(rank=4), 9),
        (PowerSGD(rank=9), 22),
        (ACPSGD(rank=9), 15),
    ],
    ids=str,
)
def test_a_step_takes_few_launches(kernels, method, count):
    """However many matrices, of however many shapes; the sum over ranks not counted."""
    launches = Launches()

    def counted(name, kernel):
        def launch(*args):
            launches.found.append(name)
            kernel(*args)

        return launch

    kernels.use(CpuToolchain(wrap=counted))
    infos = [info for info in INFOS if info.name not in ("turned", "experts")]
    ranks = Ranks(replace(method, dense_fallback=False), infos, 2)
    for turn in range(3):
        bucket = torch.randn(sum(info.numel for info in infos))
        ranks.count = turn
        route = ranks.route(0, torch.float32)
        launches.found.clear()
        with launches:
            opened = route.open(GroupStep(bucket, [turn] * len(infos), None))
            outcome = run_alone(opened.program)
            opened.account.settle(outcome.non_finite)
    assert len(launches.found) == count, launches.found


def run_alone(program: Program[Outcome]) -> Outcome:
    """One rank's program; the others send nothing, so that sums are what it sent."""
    try:
        batch = next(program)
        while True:
            batch = program.send([request.tensor for request in batch])
    except StopIteration as finished:
        return finished.value


def test_what_kernels_cannot_do_is_left_to_torch():
    gradients = random_gradients(INFOS, 1, 0)
    big = Ranks(PowerSGD(rank=module.MAX_RANK + 1, dense_fallback=False), INFOS, 1)
    big.step(gradients)
    assert big.fused_steps == 0
    renewing = Ranks(PowerSGD(rank=2, subspace_refresh_every=2, dense_fallback=False), INFOS, 1)
    for _ in range(4):
        renewing.step(gradients)
    assert renewing.fused_steps == 3
    wide = [describe("w", (24, 40), torch.float64)]
    doubles = Ranks(PowerSGD(rank=2), wide, 1)
    doubles.step(random_gradients(wide, 1, 0))
    assert doubles.fused_steps == 0


@pytest.mark.parametrize("rank", [1, 4, 6, 8, 16, 29, 32])
@pytest.mark.parametrize("spoilt", ["nothing", "dependent", "dead", "tiny", "nan"])
def test_bases_span_what_qr_spans(rank, spoilt):
    shapes = [(2, 40, rank), (1, 700, rank), (1, max(2, rank), min(2, rank))]
    generator = torch.Generator().manual_seed(rank)
    factors = [torch.randn(shape, generator=generator) for shape in shapes]
    spares = torch.cat([torch.randn(f.shape, generator=generator).reshape(-1) for f in factors])
    for factor in factors[:2]:
        if spoilt == "dependent" and rank > 1:
            factor[:, :, rank - 1] = -2 * factor[:, :, 0]
        if spoilt == "dead":
            factor[:, :, 0] = 0
        if spoilt == "tiny":
            factor *= 1e-39
    if spoilt == "nan":
        factors[1][0, 600, 0] = torch.nan
    flat = torch.cat([factor.reshape(-1) for factor in factors])
    status = torch.zeros((), dtype=torch.bool)
    bases = Kernels(CPU, rank, F32).orthogonalise(flat, make_basis_tables(shapes, spares), status)
    assert bool(status) == (spoilt == "nan")
    for factor, piece in zip(factors, bases.split([f.numel() for f in factors]), strict=True):
        basis = piece.view(factor.shape).double()
        eye = torch.eye(basis.shape[2], dtype=torch.float64).expand(len(basis), -1, -1)
        assert torch.allclose(basis.mT @ basis, eye, rtol=0, atol=1e-6)
        if spoilt != "nan":
            scaled = factor.double() / factor.abs().max().clamp(min=1e-45)
            assert torch.allclose(basis @ (basis.mT @ scaled), scaled, rtol=0, atol=1e-5)
        if spoilt == "nothing":
            plain = orthogonalise(factor.double(), factor.double())
            assert torch.allclose(basis @ basis.mT, plain @ plain.mT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [4, 16])
def test_the_flag_behind_the_factors_is_watched(rank):
    flat = torch.cat([torch.randn(40 * rank), torch.tensor([1.0, torch.nan])])
    status = torch.zeros((), dtype=torch.bool)
    kernels, table = (
        Kernels(CPU, rank, F32),
        make_basis_tables([(1, 40, rank)], torch.randn(40 * rank)),
    )
    kernels.orthogonalise(flat, table, status, watched=40 * rank)
    assert not status
    kernels.orthogonalise(flat, table, status, watched=40 * rank + 1)
    assert status


def test_layouts_that_the_kernels_know():
    def turned(shape, strides=None, kind=None):
        return is_turned(matrices_of(describe("w", shape, F32, strides, kind).slot(0)))

    assert turned((6, 4)) is False
    assert turned((6, 4), strides=(1, 6)) is True
    assert turned((6, 4, 3, 3), strides=(36, 1, 12, 4)) is False
    assert turned((5, 6, 4), kind=SlotKind.OTHER) is False
    assert turned((5, 6, 4), strides=(4, 20, 1), kind=SlotKind.OTHER) is None
    assert [warps_of(columns) for columns in (3, 256, 257, 1024, 1025, 9999)] == [1, 1, 2, 4, 8, 8]
