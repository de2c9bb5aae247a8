"""LowRankCompressor: what PowerSGD and ACP-SGD share. A group is batches of matrices; factors and flags travel in one buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, GroupPlan, GroupStep, Opened, Route, Terms
from thinwire.compress.refresh import MeanGradient
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Place, Program
from thinwire.kernels.inspection import inspect
from thinwire.layout import Group, ParameterInfo, Slot
from thinwire.lowrank.account import LowRankAccount
from thinwire.lowrank.batches import MatrixBatch, make_batches
from thinwire.lowrank.cuda.group import GroupKernels
from thinwire.lowrank.cuda.products import KernelProducts, reason_against
from thinwire.lowrank.hosts import HostSum
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import Matrices, matrices_of
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.products import Products, TorchProducts
from thinwire.lowrank.summing import FactorSum
from thinwire.memory.base import SCALED, MemoryState
from thinwire.wire.codec import Flags


class Table:
    """A group's matrices in one combination of modes, and the layouts of their factors."""

    def __init__(self, batches: Sequence[MatrixBatch], entries: Sequence[int]) -> None:
        self.batches = tuple(batches)
        self.entries = list(entries)
        """How many numbers travel for each slot."""
        self._layouts: dict[tuple[str, ...], FactorLayout] = {}

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
class LowRankStep:
    """One group in one step, ready to be multiplied."""

    table: Table
    products: Products
    sum: FactorSum | HostSum
    counts: dict[str, int]
    """How often each parameter has been exchanged before."""

    @property
    def account(self) -> LowRankAccount:
        return self.products.account


class LowRankCompressor(Compressor):
    """memory -> factors -> sum over ranks -> product. Subclasses say which factors travel when."""

    sides: tuple[str, ...] = ()
    """Which bases survive a step."""

    def __init__(
        self, rank: int, wire: str, per_host: int | None, memory: MemoryState | None = None
    ) -> None:
        """`memory` is what holds back; None = a residual."""
        self.rank = rank
        self.wire = wire
        self.per_host = per_host
        self.memory: LowRankMemory = LowRankMemory(rank, memory)
        self._infos: dict[str, ParameterInfo] = {}
        self._device = torch.device("cpu")

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
    def run(self, now: LowRankStep) -> Program[Outcome]:
        """Send the factors; leave in the account what this rank sent."""

    def expect(self, info: ParameterInfo, device: torch.device) -> None:
        self._infos[info.name] = info
        self._device = device

    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        return LowRankPlan(self, group, terms)

    def sum(self, place: Place) -> FactorSum | HostSum:
        narrow = self.wire == "bf16"
        if self.per_host is None or self.per_host == 1:
            return FactorSum(place, narrow)
        assert place.world % self.per_host == 0, "the groups inside and between hosts need that too"
        return HostSum(place, self.per_host, narrow)

    def layout(self, now: LowRankStep, sides: Sequence[str]) -> FactorLayout:
        return now.table.layout(sides, self.memory, now.account.c)

    def shared_state(self, name: str) -> dict[str, Tensor]:
        return self.state_dict([name]).get(name, {})

    def load_shared_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.load_state_dict({name: dict(state)})

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        known = [self._infos[name] for name in names if name in self._infos]
        return {info.name: self.memory.save(info, self.sides, self._device) for info in known}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        for name, saved in state.items():
            if name in self._infos:
                self.memory.load(self._infos[name], saved)


class LowRankPlan(GroupPlan):
    """A group of matrices: who multiplies them in every combination of modes."""

    def __init__(self, compressor: LowRankCompressor, group: Group, terms: Terms) -> None:
        super().__init__(group)
        self._compressor = compressor
        self._terms = terms
        self._names = [slot.name for slot in group.slots]

    def begin(self, counts: Sequence[int]) -> Hashable:
        mode = self._compressor.mode
        modes = tuple(mode(*pair) for pair in zip(self._names, counts, strict=True))
        return modes, self._compressor.memory.due(self._names, counts)

    def route(self, modes: Hashable) -> Route:
        assert isinstance(modes, tuple)
        sides: tuple[Hashable, ...]
        sides, refresh = modes
        terms, compressor, memory = self._terms, self._compressor, self._compressor.memory
        if memory.setting.form == SCALED:
            mean_gradient = MeanGradient(self.group, terms.place, memory, refresh)
            table = self._table(sides, one_by_one=terms.deterministic)
            return ScaledLowRankRoute(compressor, self.group, table, terms, mean_gradient)
        table = self._table(sides, one_by_one=False)
        objection = "the kernels do not renew subspaces"
        if not compressor.renews(table):
            found = reason_against(table.batches, self.group, compressor.rank, terms)
            if found is None:
                return KernelLowRankRoute(compressor, self.group, table, terms)
            objection = found
        # Torch rounds a batched product differently when other matrices share the batch. The kernels never do.
        table = self._table(sides, one_by_one=True) if terms.deterministic else table
        return TorchLowRankRoute(compressor, self.group, table, terms, objection)

    def _table(self, modes: Sequence[Hashable], *, one_by_one: bool) -> Table:
        shapes = [_matrices(slot) for slot in self.group.slots]
        batches = make_batches(self.group, shapes, self._compressor.rank, modes, one_by_one)
        values = self._compressor.values
        return Table(batches, [values(*pair) for pair in zip(shapes, modes, strict=True)])


class LowRankRoute(Route):
    def __init__(
        self, compressor: LowRankCompressor, group: Group, table: Table, terms: Terms
    ) -> None:
        self.compressor = compressor
        self.memory = compressor.memory
        self.table = table
        self.terms = terms
        self.sum = compressor.sum(terms.place)
        sent = slot_bytes(table.entries, self.sum.bytes_per_number(group.dtype))
        super().__init__(group, sent, table.entries)
        self._names = [slot.name for slot in group.slots]

    def step_of(self, products: Products, step: GroupStep) -> LowRankStep:
        counts = dict(zip(self._names, step.counts, strict=True))
        return LowRankStep(self.table, products, self.sum, counts)


class PlainLowRankRoute(LowRankRoute):
    """What is factorised is c itself."""

    @abstractmethod
    def products(self, step: GroupStep) -> Products:
        """Take the gradient into memory, ready to be multiplied."""

    def open(self, step: GroupStep) -> Opened:
        products = self.products(step)
        return Opened(self.compressor.run(self.step_of(products, step)), products.account)


class TorchLowRankRoute(PlainLowRankRoute):
    def __init__(
        self,
        compressor: LowRankCompressor,
        group: Group,
        table: Table,
        terms: Terms,
        objection: str,
    ) -> None:
        super().__init__(compressor, group, table, terms)
        self.objection = objection

    def products(self, step: GroupStep) -> Products:
        flags, gradients = inspect(self.group, step.bucket_flat)
        c = self.memory.compensate(self.group, gradients, step.scale).c
        slots, world = len(self.group.slots), self.terms.place.world
        return TorchProducts(LowRankAccount(c), self.memory, slots, world, flags)


class ScaledLowRankRoute(LowRankRoute):
    """In an optimizer's scale: what is factorised is c / divisor."""

    objection = "the kernels do not divide matrices by a second moment"

    def __init__(
        self,
        compressor: LowRankCompressor,
        group: Group,
        table: Table,
        terms: Terms,
        mean_gradient: MeanGradient,
    ) -> None:
        super().__init__(compressor, group, table, terms)
        self.mean_gradient = mean_gradient
        self.slot_bytes = mean_gradient.add_bytes(self.slot_bytes)

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        held = self.memory.compensate(self.group, gradients, step.scale)
        account = LowRankAccount(held.c, held)
        return Opened(self._run(account, flags, gradients, step), account)

    def _run(
        self, account: LowRankAccount, flags: Flags, gradients: Sequence[Tensor], step: GroupStep
    ) -> Program[Outcome]:
        flags = yield from self.mean_gradient.run(gradients, flags, step.counts, step.scale)
        divisor = self.memory.divisor(self.group, step.scale)
        assert divisor is not None
        slots, world = len(self.group.slots), self.terms.place.world
        products = TorchProducts(account, self.memory, slots, world, flags, divisor.flat)
        outcome: Outcome = yield from self.compressor.run(self.step_of(products, step))
        return outcome


class KernelLowRankRoute(PlainLowRankRoute):
    """The kernels' bits never depend on the bucketing."""

    backend = "CUDA kernels"

    def __init__(
        self, compressor: LowRankCompressor, group: Group, table: Table, terms: Terms
    ) -> None:
        super().__init__(compressor, group, table, terms)
        world = terms.place.world
        self.kernels = GroupKernels(group, compressor.rank, terms.gradient_dtype, world)

    def products(self, step: GroupStep) -> Products:
        buffers = self.memory.stores["residual"].bind(self.group).begin(step.scale)
        return KernelProducts(
            LowRankAccount(buffers.now),
            self.memory,
            self.kernels,
            self.group,
            step.bucket_flat,
            buffers,
            self.terms.place.world,
        )


def _matrices(slot: Slot) -> Matrices:
    shape = matrices_of(slot)
    assert shape is not None, "the plan sends such a slot densely"
    return shape


def slot_bytes(entries: Sequence[int], bytes_per_number: float) -> list[float]:
    """Per slot: its factors and its flag, and an even share of the group's own flag."""
    return [bytes_per_number * (count + 1 + 1 / len(entries)) for count in entries]
