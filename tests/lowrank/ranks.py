"""Virtual ranks of a low-rank method: all in one process, one group of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import GroupStep, Opened, Route, Terms
from thinwire.engine.virtual import run_virtual
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Place, begin_now
from thinwire.kernels.inspection import inspect_pieces
from thinwire.layout import (
    BucketLayout,
    Group,
    ParameterInfo,
    SlotKind,
    contiguous_strides,
    kind_from_shape,
)
from thinwire.memory.base import add_gradients
from thinwire.methods.lowrank import LowRankMethod
from thinwire.observe.ledger import Ledger


def describe(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
    kind: SlotKind | None = None,
) -> ParameterInfo:
    strides = strides or contiguous_strides(shape)
    return ParameterInfo(name, shape, strides, dtype, kind or kind_from_shape(len(shape)))


class Ranks:
    """`world` ranks that send the parameters `infos` with `method`, by kernels where there are some for the CPU."""

    def __init__(
        self,
        method: LowRankMethod,
        infos: Sequence[ParameterInfo],
        world: int,
        deterministic: bool = False,
    ) -> None:
        self.world = world
        self.per_host = method.per_host
        self.infos = list(infos)
        self.deterministic = deterministic
        self.compressors = [method.compressor() for _ in range(world)]
        for compressor in self.compressors:
            for info in infos:
                compressor.expect(info, torch.device("cpu"))
        self.count = 0
        self.routes: dict[Any, Route] = {}
        self.fused_steps = 0
        """How often a rank was served by kernels."""
        self.ledgers = [Ledger(world) for _ in range(world)]
        self.regroup(self.infos)

    def regroup(self, infos: Sequence[ParameterInfo]) -> None:
        """Another order of the same parameters, as after a re-bucketing."""
        slots, offset = [], 0
        for info in infos:
            slots.append(info.slot(offset))
            offset += info.numel
        dtype = infos[0].dtype
        layout = BucketLayout(tuple(slots), offset, dtype, torch.device("cpu"))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.groups = [Group.of(layout, slots, wide) for _ in range(self.world)]

    def step(
        self, gradients: Sequence[Mapping[str, Tensor]], bad: bool = False
    ) -> tuple[dict[str, Tensor], Outcome]:
        """One exchange; `gradients` per rank. Returns the update by name; all ranks must agree on its bits."""
        self.opened = [self._open(rank, gradients[rank]) for rank in range(self.world)]
        programs = [o.program for o in self.opened]
        outcomes = run_virtual(programs, self.ledgers, per_host=self.per_host)
        outcomes = [self._in_group(rank, one) for rank, one in enumerate(outcomes)]
        self.count += 1
        for outcome in outcomes[1:]:
            assert torch.equal(
                outcomes[0].update.view(torch.uint8), outcome.update.view(torch.uint8)
            )
        self.accepted = [o.account.accepted() for o in self.opened]
        for one, outcome in zip(self.opened, outcomes, strict=True):
            one.account.settle(outcome.non_finite | bad)
        update = {s.name: s.view(outcomes[0].update).clone() for s in self.groups[0].slots}
        return update, outcomes[0]

    def _open(self, rank: int, gradients: Mapping[str, Tensor]) -> Opened:
        """Open one rank's step; `c` remembers gradient + residual."""
        group = self.groups[rank]
        memory = self.compressors[rank].memory
        assert memory is not None
        dtype = next(iter(gradients.values())).dtype
        flat = torch.zeros(sum(slot.numel for slot in group.slots), dtype=dtype)
        for slot in group.sources:
            slot.view(flat).copy_(gradients[slot.name])
        if rank == 0:
            self.c = []
        self.c.append(memory.stores["residual"].bind(group).flat.clone())
        _, finite = inspect_pieces(group.pieces(flat))
        add_gradients(self.c[-1], group, finite)
        route = self.route(rank, dtype)
        if rank == 0:
            # What rank 0 brings to this exchange, flags apart, and what it is expected to send.
            self.numbers, self.expected = sum(route.entries), sum(route.slot_bytes)
        self.fused_steps += route.backend == "CUDA kernels"
        opened = route.open(GroupStep(flat, [self.count] * len(group.slots), None))
        # The first product of a step takes the gradient into memory.
        opened.program = begin_now(opened.program)
        assert torch.equal(opened.account.c, self.c[-1])
        return opened

    def route(self, rank: int, dtype: torch.dtype) -> Route:
        """How a rank's group travels in this step."""
        terms = Terms(Place(rank, self.world), dtype, True, self.deterministic)
        plan = self.compressors[rank].plan(self.groups[rank], terms)
        modes = plan.begin([self.count] * len(self.groups[rank].slots))
        key = (rank, self.groups[rank], terms, modes)
        if key not in self.routes:
            self.routes[key] = plan.route(modes)
        return self.routes[key]

    def _in_group(self, rank: int, outcome: Outcome) -> Outcome:
        """The outcome with its update in the group's layout, wherever it was delivered."""
        if not outcome.delivered:
            return outcome
        group = self.groups[rank]
        update = torch.zeros(group.numel, dtype=group.dtype)
        for slot, piece in zip(group.slots, group.pieces(outcome.update), strict=True):
            slot.span(update).copy_(piece)
        return replace(outcome, update=update)

    @property
    def ledger(self) -> Ledger:
        """What rank 0 sent."""
        return self.ledgers[0]

    def residual(self, rank: int, name: str) -> Tensor:
        memory = self.compressors[rank].memory
        assert memory is not None
        held = memory.stores["residual"].read(name)
        assert held is not None
        return held


def random_gradients(
    infos: Sequence[ParameterInfo], world: int, seed: int
) -> list[dict[str, Tensor]]:
    """Normal numbers per rank and name, around a mean that all ranks share."""
    generator = torch.Generator().manual_seed(seed)

    def normal(info: ParameterInfo) -> Tensor:
        return torch.randn(info.shape, generator=generator, dtype=torch.float64)

    shared = {info.name: normal(info) for info in infos}
    return [
        {info.name: (shared[info.name] + normal(info)).to(info.dtype) for info in infos}
        for _ in range(world)
    ]
