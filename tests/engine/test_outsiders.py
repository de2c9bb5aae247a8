"""Parts from outside the package take the fast path by naming what they compute, or are told why not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.kernels.cpu_compiler import CpuToolchain, Switch, needs_compiler, switch
from thinwire.compress import TOP_K_KERNELS, Opened, Route, forget_backend
from thinwire.engine.bucket_plan import backends_of
from thinwire.exchange import AllGather, Offer, Swap
from thinwire.layout import rows_along
from thinwire.select import ExactTopK, TradTopK
from thinwire.wire import Flags

SHAPES = {"weight": (40, 64), "bias": (8,)}


# -- the parts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnTopK(ExactTopK):
    """An own selection: the largest of every column, in its own rows. It inherits the form of exact top-k."""

    density: float

    def rows(self, slot, mode=None):
        return rows_along(slot, 0, self.density)


@dataclass(frozen=True)
class RingGather(AllGather):
    """An own exchange: payloads go round in a ring. It inherits the form of AllGather."""

    def gather(self, payload, place, *, phase, control_bytes):
        rows = {place.rank: payload}
        passing = payload
        for turn in range(1, place.world):
            to, source = (place.rank + 1) % place.world, (place.rank - 1) % place.world
            (passing,) = yield (Swap(passing, f"{phase}/ring", to=to, source=source),)
            rows[(place.rank - turn) % place.world] = passing
        return torch.stack([rows[rank] for rank in range(place.world)])


@dataclass(frozen=True)
class LargestOdd(TradTopK):
    """An own selection that chooses otherwise: it loses the form of what it is made of."""

    def pick(self, c, table):
        return super().pick(torch.where(torch.arange(len(c)) % 2 == 1, c, 0.0), table)


@dataclass(frozen=True)
class NamedOdd(LargestOdd):
    """The same with a form of its own, for which a backend can be registered."""

    form = "the largest at odd places"


class OddRoute(Route):
    """An own fast path for it: here the parts again, without the look for what is not finite."""

    backend = "odd kernels"

    def __init__(self, task):
        super().__init__(task.group, task.slot_bytes, task.entries)
        self.task = task

    def open(self, step):
        task = self.task
        gradients = task.group.pieces(step.bucket_flat)
        every = torch.ones(len(gradients), dtype=torch.bool)
        offer = Offer(
            task.memory.compensate(task.group, gradients, step.scale),
            task.selection,
            task.codec,
            Flags(torch.tensor(False), every),
            task.terms.place,
            phase="sparse",
        )
        return Opened(task.exchange.run(offer), offer.account)


ODD_KERNELS = replace(
    TOP_K_KERNELS,
    name="kernels for odd places",
    selections={NamedOdd.form},
    serves=lambda device: True,
    route=OddRoute,
)


# -- what becomes of them ----------------------------------------------------------------------------------------


@pytest.fixture
def launched() -> list[str]:
    """The kernels that were launched, in order."""
    return []


@pytest.fixture
def kernels(launched: list[str]) -> Iterator[Switch]:
    """Kernels serve the CPU, as they do a GPU. `kernels(False)` takes them away."""

    def noted(name, kernel):
        def launch(*args):
            launched.append(name)
            kernel(*args)

        return launch

    with switch("cpu", CpuToolchain(wrap=noted)) as made:
        yield made


def run(select, exchange, steps: int = 3) -> tuple[list[dict[str, torch.Tensor]], str]:
    """(updates and what is held back, step by step; who did the work)."""
    method = tw.Compose(select=select, exchange=exchange, dense_fallback=False)
    cluster = Cluster(3, method, shapes=SHAPES)
    seen = []
    for step in range(steps):
        seen += cluster.step(cluster.random(step))
        seen += [cluster.residuals(rank) for rank in range(cluster.world)]
    return seen, backends_of(cluster.reducers[0].routes)["weight"]


def same(ours, theirs) -> bool:
    return all(torch.equal(a[n], b[n]) for a, b in zip(ours, theirs, strict=True) for n in SHAPES)


@needs_compiler
@pytest.mark.parametrize(
    "select, exchange",
    [
        (ColumnTopK(0.1), AllGather()),
        (TradTopK(0.1), RingGather()),
        (ColumnTopK(0.1), RingGather()),
    ],
    ids=["own selection", "own exchange", "both"],
)
def test_own_parts_take_the_kernels_with_the_same_bits(kernels, launched, select, exchange):
    fast, told = run(select, exchange)
    assert told == "CUDA kernels"
    assert launched
    kernels(False)
    launched.clear()
    plain, told = run(select, exchange)
    assert told == f"torch: the {TOP_K_KERNELS.name} do not run on cpu"
    assert not launched
    assert same(fast, plain)


def test_an_own_exchange_carries_what_the_packages_own_carries():
    ours, _ = run(TradTopK(0.1), RingGather())
    theirs, _ = run(TradTopK(0.1), AllGather())
    assert same(ours, theirs)


@needs_compiler
def test_a_selection_that_chooses_otherwise_is_told_why_it_has_no_kernels(kernels, launched):
    _, told = run(LargestOdd(0.1), AllGather())
    assert told.startswith("torch: ")
    assert "do not know the selection LargestOdd: it names no form" in told
    assert not [name for name in launched if "encode" in name]


def test_a_registered_backend_does_the_work_of_a_form_of_its_own():
    plain, told = run(NamedOdd(0.1), AllGather())
    assert f"its form is {NamedOdd.form!r}" in told
    tw.register_backend(ODD_KERNELS)
    try:
        fast, told = run(NamedOdd(0.1), AllGather())
    finally:
        forget_backend(ODD_KERNELS)
    assert told == OddRoute.backend
    assert same(fast, plain)


@pytest.mark.parametrize("part", [ColumnTopK, RingGather, LargestOdd, NamedOdd, OddRoute])
def test_a_part_takes_few_lines(part):
    assert len(inspect.getsource(part).splitlines()) < 40
