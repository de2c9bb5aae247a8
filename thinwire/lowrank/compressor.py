"""What PowerSGD and ACP-SGD share: a group of parameters as batches of matrices, a buffer of factors, flags beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.compressor import BucketStep, Compressor, GroupStep, Opened
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Batch, Place, Program
from thinwire.layout import ParameterInfo, Slot
from thinwire.lowrank.account import LowRankAccount
from thinwire.lowrank.batches import MatrixBatch, make_batches
from thinwire.lowrank.cuda.group import GroupKernels
from thinwire.lowrank.cuda.products import ALIGNMENT, KernelProducts, can_multiply
from thinwire.lowrank.hosts import HostSum
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import Matrices, matrices_of
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.products import Products, TorchProducts
from thinwire.lowrank.summing import FactorSum
from thinwire.plan.groups import Group


class Table:
    """A group's matrices in one combination of modes, and the layouts of their factors."""

    def __init__(self, batches: Sequence[MatrixBatch], entries: Sequence[int]) -> None:
        self.batches = tuple(batches)
        self.entries = list(entries)
        """How many numbers travel for each slot."""
        self._layouts: dict[tuple[str, ...], FactorLayout] = {}
        self.kernels: dict[tuple[torch.dtype, int], GroupKernels | None] = {}
        """By the bucket's dtype and the world; None where there are none for these matrices."""

    def layout(self, sides: Sequence[str], memory: LowRankMemory, like: Tensor) -> FactorLayout:
        key = tuple(sides)
        if key not in self._layouts:
            pairs = list(zip(self.batches, key, strict=True))
            # Not the tensor itself, which may be a model's worth of memory.
            like = like.new_empty(0)
            self._layouts[key] = FactorLayout(
                self.batches, key, lambda: [memory.spares(b, side, like) for b, side in pairs]
            )
        return self._layouts[key]


@dataclass(frozen=True, eq=False)
class Round:
    """One group in one step, ready to be multiplied."""

    table: Table
    account: LowRankAccount
    products: Products
    sum: FactorSum | HostSum
    counts: dict[str, int]
    """How often each parameter has been exchanged before."""


class LowRankCompressor(Compressor):
    """memory -> factors -> sum over ranks -> product. Subclasses say which factors travel when."""

    sides: tuple[str, ...] = ()
    """Which bases survive a step."""

    def __init__(self, rank: int, wire: str, per_host: int | None) -> None:
        self.rank = rank
        self.wire = wire
        self.per_host = per_host
        self.memory: LowRankMemory = LowRankMemory(rank)
        self._infos: dict[str, ParameterInfo] = {}
        self._device = torch.device("cpu")
        self._tables: WeakKeyDictionary[Group, dict[tuple[Hashable, ...], Table]] = (
            WeakKeyDictionary()
        )

    @abstractmethod
    def mode(self, name: str, count: int) -> Hashable:
        """What a parameter does in its `count`-th exchange; the same on all ranks."""

    @abstractmethod
    def values(self, shape: Matrices, mode: Hashable) -> int:
        """How many numbers travel for a parameter in that mode."""

    def renews(self, table: Table) -> bool:
        """Whether a step in these modes begins with more than one product."""
        return False

    @abstractmethod
    def run(self, now: Round) -> Program[Outcome]:
        """Send the factors; leave in the account what this rank sent."""

    def expect(self, info: ParameterInfo, device: torch.device) -> None:
        self._infos[info.name] = info
        self._device = device

    def open_fused(self, step: BucketStep) -> Opened | None:
        """The kernels' bits never depend on the bucketing, so `deterministic` is for the sum over ranks alone."""
        group, flat, world = step.group, step.bucket_flat, step.place.world
        if flat.data_ptr() % ALIGNMENT:
            return None
        table = self._table(group, step.steps, False)
        if self.renews(table):
            return None
        key = (flat.dtype, world)
        if key not in table.kernels:
            known = can_multiply(table.batches, group, self.rank, flat.dtype)
            table.kernels[key] = GroupKernels(group, self.rank, *key) if known else None
        kernels = table.kernels[key]
        if kernels is None:
            return None
        binding = self.memory.stores["residual"].bind(group)
        account, ratio = LowRankAccount(binding.flat), binding.retarget(step.scale)
        products = KernelProducts(account, self.memory, kernels, group, flat, ratio, world)
        return self._start(table, products, group, step.steps, step.place, step.deterministic)

    def open(self, step: GroupStep) -> Opened:
        table = self._table(step.group, step.steps, step.deterministic)
        c = self.memory.compensate(step.group, step.gradients, step.scale).c
        account = LowRankAccount(c)
        slots, world = len(step.group.slots), step.place.world
        products = TorchProducts(account, self.memory, slots, world, step.flags)
        return self._start(table, products, step.group, step.steps, step.place, step.deterministic)

    def _start(
        self,
        table: Table,
        products: Products,
        group: Group,
        steps: Sequence[int],
        place: Place,
        deterministic: bool,
    ) -> Opened:
        now = Round(
            table,
            products.account,
            products,
            self._sum(place, deterministic),
            dict(zip((slot.name for slot in group.slots), steps, strict=True)),
        )
        sent = slot_bytes(table.entries, now.sum.bytes_per_number(group.dtype))
        return Opened(begin_now(self.run(now)), now.account, sent, table.entries)

    def _sum(self, place: Place, deterministic: bool) -> FactorSum | HostSum:
        narrow = self.wire == "bf16"
        if self.per_host is None or self.per_host == 1:
            return FactorSum(place, deterministic, narrow)
        assert place.world % self.per_host == 0, "the groups inside and between hosts need that too"
        return HostSum(place, self.per_host, deterministic, narrow)

    def layout(self, now: Round, sides: Sequence[str]) -> FactorLayout:
        return now.table.layout(sides, self.memory, now.account.c)

    def _table(self, group: Group, steps: Sequence[int], one_by_one: bool) -> Table:
        modes = tuple(
            self.mode(slot.name, count) for slot, count in zip(group.slots, steps, strict=True)
        )
        known = self._tables.setdefault(group, {})
        key = (one_by_one, *modes)
        if key not in known:
            shapes = [_matrices(slot) for slot in group.slots]
            batches = make_batches(group, shapes, self.rank, modes, one_by_one)
            entries = [self.values(shape, m) for shape, m in zip(shapes, modes, strict=True)]
            known[key] = Table(batches, entries)
        return known[key]

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        known = [self._infos[name] for name in names if name in self._infos]
        return {info.name: self.memory.save(info, self.sides, self._device) for info in known}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        for name, saved in state.items():
            if name in self._infos:
                self.memory.load(self._infos[name], saved)


def begin_now(program: Program[Outcome]) -> Program[Outcome]:
    """Run a program up to its first request; the rest of it, beginning with that request.

    A driver may start programs later, when there is enough to send; encoding then overlaps with backward all the same.
    """
    try:
        batch = next(program)
    except StopIteration as finished:
        return _finished(finished.value)
    return _go_on(program, batch)


def _finished(outcome: Outcome) -> Program[Outcome]:
    yield from ()
    return outcome


def _go_on(program: Program[Outcome], batch: Batch) -> Program[Outcome]:
    try:
        while True:
            batch = program.send((yield batch))
    except StopIteration as finished:
        return finished.value


def _matrices(slot: Slot) -> Matrices:
    shape = matrices_of(slot)
    assert shape is not None, "the plan sends such a slot densely"
    return shape


def slot_bytes(entries: Sequence[int], bytes_per_number: float) -> list[float]:
    """Per slot: its factors and its flag, and an even share of the group's own flag."""
    return [bytes_per_number * (count + 1 + 1 / len(entries)) for count in entries]
