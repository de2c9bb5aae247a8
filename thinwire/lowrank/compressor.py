"""What PowerSGD and ACP-SGD share: a group of parameters as batches of matrices, a buffer of factors, flags beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.compressor import Compressor, GroupStep, Opened
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Place, Program
from thinwire.layout import ParameterInfo, Slot
from thinwire.lowrank.account import LowRankAccount, Sent
from thinwire.lowrank.basis import exact_products
from thinwire.lowrank.batches import MatrixBatch, make_batches
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import Matrices, matrices_of
from thinwire.lowrank.memory import LowRankMemory
from thinwire.lowrank.summing import FactorSum, Summed
from thinwire.plan.groups import Group
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
class Round:
    """One group in one step, ready to be multiplied."""

    table: Table
    account: LowRankAccount
    flags: Flags
    sum: FactorSum
    counts: dict[str, int]
    """How often each parameter has been exchanged before."""

    @property
    def control(self) -> int:
        """How many numbers beside the factors travel once per step."""
        return self.flags.had_gradient.numel() + 1


class LowRankCompressor(Compressor):
    """memory -> factors -> sum over ranks -> product. Subclasses say which factors travel when."""

    sides: tuple[str, ...] = ()
    """Which bases survive a step."""

    def __init__(self, rank: int, wire: str) -> None:
        self.rank = rank
        self.wire = wire
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

    @abstractmethod
    def run(self, now: Round) -> Program[Outcome]:
        """Send the factors; leave in the account what this rank sent."""

    def expect(self, info: ParameterInfo, device: torch.device) -> None:
        self._infos[info.name] = info
        self._device = device

    def open(self, step: GroupStep) -> Opened:
        group = step.group
        modes = tuple(
            self.mode(slot.name, count) for slot, count in zip(group.slots, step.steps, strict=True)
        )
        table = self._table(group, modes, step.deterministic)
        c = self.memory.compensate(group, step.gradients, step.scale).c
        account = LowRankAccount(c, self.memory, len(group.slots))
        narrow = self.wire == "bf16"
        now = Round(
            table,
            account,
            step.flags,
            FactorSum(step.place, step.deterministic, narrow),
            dict(zip((slot.name for slot in group.slots), step.steps, strict=True)),
        )
        itemsize = torch.bfloat16.itemsize if narrow else c.element_size()
        sent = slot_bytes(table.entries, itemsize, step.place)
        return Opened(self.run(now), account, sent, table.entries)

    def layout(self, now: Round, sides: Sequence[str]) -> FactorLayout:
        return now.table.layout(sides, self.memory, now.account.c)

    def project(
        self, now: Round, layout: FactorLayout, bases: Sequence[Tensor], *, with_flags: bool
    ) -> Tensor:
        """c x basis (or c^T x basis) of every batch in one buffer, the flags behind them.

        Flags survive a sum: a slot had a gradient if any rank added 1, and NaN marks a bad step.
        """
        c = now.account.c
        control = now.control if with_flags else 0
        buffer = torch.empty(layout.numel + control, dtype=c.dtype, device=c.device)
        if control:
            buffer[layout.numel : -1] = now.flags.had_gradient
            buffer[-1:] = torch.where(now.flags.non_finite, torch.nan, 0.0)
        with exact_products(c.device):
            for batch, side, basis, out in zip(
                layout.batches, layout.sides, bases, layout.sections(buffer), strict=True
            ):
                batch.multiply(c, basis, side, out)
        return buffer

    def deliver(
        self, now: Round, layout: FactorLayout, bases: Sequence[Tensor], summed: Summed
    ) -> Tensor:
        """The mean update out of the summed factors; the account learns what this rank sent."""
        account = now.account
        update = torch.zeros_like(account.c)
        weights = layout.spread(account.used.to(update.dtype) / now.sum.place.world)
        mean = weights.mul_(summed.total[: layout.numel])
        with exact_products(update.device):
            for batch, side, factor, basis in zip(
                layout.batches, layout.sides, layout.sections(mean), bases, strict=True
            ):
                p, q = (factor, basis) if side == "p" else (basis, factor)
                batch.rebuild(update, p, q)
        part = summed.part[: layout.numel]
        account.sent = Sent(layout, part, list(bases), layout.orthogonalise(mean))
        return update

    def _table(self, group: Group, modes: tuple[Hashable, ...], one_by_one: bool) -> Table:
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


def _matrices(slot: Slot) -> Matrices:
    shape = matrices_of(slot)
    assert shape is not None, "the plan sends such a slot densely"
    return shape


def slot_bytes(entries: Sequence[int], itemsize: int, place: Place) -> list[float]:
    """Per slot: its factors and its flag, and an even share of the group's own flag, at the cost of an all-reduce."""
    share = 2 * (place.world - 1) / place.world * itemsize
    return [share * (count + 1 + 1 / len(entries)) for count in entries]


def is_finite(buffer: Tensor) -> Tensor:
    """bool []"""
    return torch.linalg.vector_norm(buffer, torch.inf) < torch.inf
