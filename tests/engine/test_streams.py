"""Suspended programs: whatever is made before the first request and read after it can be kept alive by a driver that
goes on with the program on another stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import thinwire as tw
from tests.models import batches, make_cnn
from thinwire.engine.streams import find_held
from thinwire.engine.virtual import VirtualRanks
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.requests import Sum, together
from thinwire.exchange.split import SplitReduce
from thinwire.tools.methods import METHODS, build_method, keep_taken

WORLD = 2
OTHERS = {
    "oktopk-full": lambda: tw.OkTopK(density=0.05, exchange=SplitReduce(contribution="full")),
    "leader": lambda: tw.TopK(density=0.05, exchange=CyclicLeader()),
    "hierarchical": lambda: tw.TopK(density=0.05, exchange=tw.exchange.Hierarchical(per_host=1)),
    "powersgd-refresh": lambda: tw.PowerSGD(rank=2, subspace_refresh_every=1),
}


def make(name: str) -> tw.Method:
    if name in OTHERS:
        return OTHERS[name]()
    return build_method(name, keep_taken(name, density=0.05, rank=2))


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Watch(TorchDispatchMode):
    """Which tensors of the first phase the second one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding = True
        self.made: dict[int, tuple[StorageWeakRef, str]] = {}
        self.read: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not self.encoding:
            for which in map(storage, inputs):
                if which in self.made and not self.made[which][0].expired():
                    self.read[which] = self.made[which]
        result = func(*args, **(kwargs or {}))
        if self.encoding:
            known = set(map(storage, inputs))
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and storage(tensor) not in known:
                    what = f"{func} {tuple(tensor.shape)} {tensor.dtype}"
                    self.made[storage(tensor)] = StorageWeakRef(tensor.untyped_storage()), what
        return result


def go_on_from(program, batch):
    """The rest of a program that has been run up to its first request."""
    try:
        while True:
            batch = program.send((yield batch))
    except StopIteration as finished:
        return finished.value


def run_bucket(sim: tw.Simulation, stack, *, hold_programs: bool) -> set[str]:
    """What the programs of a bucket read after their first request and nobody holds when they have ended, although
    their first requests and, if asked for, all that they held themselves is kept."""
    watch = Watch()
    with torch.no_grad(), watch:
        for handle, bucket in zip(sim.handles, stack.buckets, strict=True):
            handle.reducer.reduce(bucket)
        programs = [handle.reducer.driver.pending.pop()[0] for handle in sim.handles]
        waiting = [next(program) for program in programs]
        held = [find_held(programs) if hold_programs else None, *waiting]
        watch.encoding = False
        rest = [go_on_from(*pair) for pair in zip(programs, waiting, strict=True)]
        del programs, waiting
        VirtualRanks(WORLD, per_host=1).run(rest)
        del rest
    dead = {what for alive, what in watch.read.values() if alive.expired()}
    del held
    return dead


def lost(name: str, *, hold_programs: bool, deterministic: bool = False) -> set[str]:
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sim = tw.simulate(
        model,
        make(name),
        workers=WORLD,
        optimizer=optimizer,
        bucket_mb=0.02,
        deterministic=deterministic,
    )
    dead = set()
    for step in range(2):
        for rank in sim.ranks:
            with sim.worker(rank):
                images, labels = list(batches(rank, 2))[step]
                nn.functional.cross_entropy(model(images), labels).backward()
        for stack in sim.stacks:
            dead |= run_bucket(sim, stack, hold_programs=hold_programs)
            stack.deliver()
    sim.close()
    return dead


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_everything_that_is_read_later_is_held(name):
    assert lost(name, hold_programs=True) == set()


def test_it_is_held_with_sums_in_rank_order_too():
    assert lost("oktopk-full", hold_programs=True, deterministic=True) == set()


def test_split_reduce_reads_later_only_what_its_account_and_its_requests_hold():
    """It once kept the entries' slots and counted with them at the very end, when their memory was somebody else's."""
    assert lost("oktopk", hold_programs=False) == set()


def test_mutation_only_requests_are_held():
    assert any("float32" in what for what in lost("signsgd", hold_programs=False))


def test_programs_hold_what_the_programs_inside_them_hold():
    def inner(which: int):
        made = torch.full((), float(which))
        yield (Sum(torch.zeros(1)),)
        return made

    def outer():
        taken = {"a": [torch.full((), 2.0)]}
        both = together([inner(0), inner(1)])
        first = next(both)
        taken.clear()
        yield first
        return taken, both

    def around():
        return (yield from outer())

    program = around()
    next(program)
    found = {float(one) for one in find_held(program) if isinstance(one, Tensor) and one.dim() == 0}
    assert found == {0.0, 1.0}
    program.close()
    assert find_held(program) == []


def test_a_program_that_several_know_is_looked_into_once():
    """As a local variable, and as what is run: with every program around it there were twice as many ways to it."""

    def around(depth: int):
        made = torch.full((), float(depth))
        if depth:
            inside = around(depth - 1)
            yield from inside
        else:
            yield (Sum(torch.zeros(1)),)
        return made

    depth = 12
    program = around(depth)
    next(program)
    held = find_held(program)
    tensors = [float(one) for one in held if isinstance(one, Tensor)]
    assert set(tensors) == set(range(depth + 1))
    assert len(held) < 6 * depth
    program.close()
