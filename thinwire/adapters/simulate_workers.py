"""Simulated workers: a handle for each, on a seat among virtual ranks, and the gradients of all of them, stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire.adapters.fusion import FusionBuffer
from thinwire.errors import UsageError
from thinwire.exchange.drivers import Driver, VirtualRanks
from thinwire.exchange.hierarchy import join_hosts
from thinwire.exchange.lockstep import in_teams
from thinwire.exchange.network import Network
from thinwire.exchange.requests import Place, Program
from thinwire.handle import Handle
from thinwire.layout import Bucket, ParameterInfo
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger
from thinwire.optim import Takeover
from thinwire.plan.policy import Rule

ROW_ALIGNMENT = 64
"""Elements."""


class Seat(Driver):
    """One virtual rank: keeps its program until those of all ranks are there to be run in lockstep."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._program: Program[Tensor] | None = None

    def start(
        self, program: Program[Tensor], future: Future[Tensor] | None = None
    ) -> Future[Tensor]:
        self._program = program
        return self.new_future() if future is None else future

    def take(self) -> Program[Tensor] | None:
        program, self._program = self._program, None
        return program

    def close(self) -> None: ...


class Seats:
    """The virtual ranks of a simulation and the traffic of each."""

    def __init__(self, world: int) -> None:
        self.drivers = [Seat(Place(rank, world)) for rank in range(world)]
        self.ledgers = [Ledger(world) for _ in range(world)]
        self._ranks = VirtualRanks(world, self.ledgers, per_host=None)

    def add_hosts(self, per_host: int) -> None:
        """Place the ranks on hosts of that many, for requests inside and between hosts."""
        world = len(self.drivers)
        if world % per_host:
            raise UsageError(f"per_host is {per_host}; it must divide the number of ranks, {world}")
        self._ranks = VirtualRanks(world, self.ledgers, per_host)

    def run(self, futures: Sequence[Future[Tensor]]) -> None:
        """Run what every rank has started; a rank that could not start says why."""
        programs: list[Program[Tensor]] = []
        for driver, future in zip(self.drivers, futures, strict=True):
            program = driver.take()
            if program is None:
                future.value()
                raise AssertionError("a pipeline neither started nor failed")
            programs.append(program)
        with in_teams():
            self._ranks.run(programs)


class WorkerHandle(Handle):
    """What `tw.attach` returns to a real worker, for a simulated one.

    There is nobody to agree with: all workers are made from the same settings. Nobody waits either: buckets are exchanged one by one.
    """

    worth_sending = 0

    def __init__(
        self,
        infos: Mapping[str, ParameterInfo],
        method: Method,
        *,
        rank: int,
        seats: Seats,
        device: torch.device,
        policy: Sequence[Rule] | None,
        grad_scaler: Any,
        deterministic: bool,
        takeover: Takeover | None,
    ) -> None:
        self._seats = seats
        self._seat = rank
        super().__init__(
            infos,
            method,
            device=device,
            policy=policy,
            process_group=None,
            grad_scaler=grad_scaler,
            deterministic=deterministic,
            takeover=takeover,
        )

    def _connect(self, process_group: dist.ProcessGroup | None, device: torch.device) -> Driver:
        self.ledger = self._seats.ledgers[self._seat]
        return self._seats.drivers[self._seat]

    def _commit_takeover(self) -> None:
        """The simulation does it once for all workers."""

    def _agree(self, method: Method, policy: Sequence[Rule]) -> None: ...

    def _join_hosts(self) -> None:
        join_hosts(cast(Network, self._seats), self._host_sizes())


class GradientStack:
    """One bucket of every worker, a row each. Workers fill their rows, the exchange leaves the update in all of them."""

    def __init__(self, buffer: FusionBuffer, workers: int) -> None:
        flat = buffer.bucket.flat
        layout = buffer.bucket.layout
        self.parameters: list[nn.Parameter] = buffer.parameters
        # Kernels load 16 bytes at a time, from the beginning of a row as from that of a buffer.
        width = -(-flat.numel() // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self.rows = flat.new_zeros(workers, width)[:, : flat.numel()]
        self.buckets = [Bucket(layout, row) for row in self.rows]
        self._views = [[slot.view(row) for slot in layout.slots] for row in self.rows]
        self._filled: list[set[int]] = [set() for _ in range(workers)]
        """By worker: which parameters it has had a gradient for in this step."""

    def lend(self, rank: int) -> None:
        """`p.grad` becomes what the worker has so far, for backward to add to; None where it has nothing."""
        views = self._views[rank]
        for which, parameter in enumerate(self.parameters):
            parameter.grad = views[which] if which in self._filled[rank] else None

    def collect(self, rank: int) -> None:
        """Take the worker's gradients off the model and into its row."""
        views, filled = self._views[rank], self._filled[rank]
        copied: list[int] = []
        for which, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                if which not in filled:
                    views[which].zero_()
            elif parameter.grad is not views[which]:
                copied.append(which)
        if copied:
            gradients = [cast(Tensor, self.parameters[which].grad) for which in copied]
            torch._foreach_copy_([views[which] for which in copied], gradients)
        filled.update(copied)
        self.drop()

    def drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def deliver(self) -> None:
        """`p.grad` becomes the update; None where no worker had a gradient, as under DDP."""
        used = set().union(*self._filled)
        for which, parameter in enumerate(self.parameters):
            parameter.grad = self._views[0][which] if which in used else None
        for filled in self._filled:
            filled.clear()
