"""A cell on the machines where a launcher has started this command: every process starts one worker of its own.

The processes meet in the launcher's store. Rank 0 has the plan and the rows. It writes an order for each cell into the store, all
processes follow it, and each writes there how its worker ended. Workers meet at a port of their own, so that a cell that died
leaves nothing to the next.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.bench.step_cell import StepCell
from thinwire.bench.step_places import CANCELLED, TIME_UP, Attempt, Place, free_port, run_workers

PATIENCE_S = 30.0
"""How long rank 0 waits for the others to say how a worker ended, once its own has."""
LOOK_S = 0.2
"""Between two looks at the store."""


@dataclass(frozen=True)
class Order:
    """What every process is to start for one cell."""

    arguments: list[str]
    """Of Python."""
    port: int
    timeout_s: float


class ClusterPlace(Place):
    """The place as rank 0 sees it; the other ranks `follow`."""

    name = "cluster"

    def __init__(self) -> None:
        store, self.rank, self.world = next(dist.rendezvous("env://"))
        self._store = dist.PrefixStore("thinwire-bench-step", store)
        self._orders = 0

    def run(self, cell: StepCell, command: Sequence[str], timeout_s: float) -> Attempt:
        order = Order(list(command[1:]), free_port(), timeout_s)
        self._store.set(f"{self._orders}/order", json.dumps(asdict(order)))
        own = self._start(order)
        ends = [own, *(self._end_of(rank) for rank in range(1, self.world))]
        self._orders += 1
        failed = [end for end in ends if end.exit_code]
        # Who failed by itself has the reason, and not who was ended for its sake.
        return min(failed, key=lambda end: end.exit_code == CANCELLED, default=own)

    def follow(self) -> None:
        """Start a worker for every order, until there are no more."""
        try:
            while (text := self._wait_for(f"{self._orders}/order")) != "":
                self._start(Order(**json.loads(text)))
                self._orders += 1
        finally:
            self._store.add("left", 1)

    def close(self) -> None:
        """Let the others go, and stay until they have: the store may live in this process."""
        if self.rank:
            return
        self._store.set(f"{self._orders}/order", "")
        deadline = time.monotonic() + PATIENCE_S
        while self._store.add("left", 0) < self.world - 1 and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _start(self, order: Order) -> Attempt:
        """Run this process's worker to its end, or until another one has failed, and tell the others."""
        environment = {**os.environ, "MASTER_PORT": str(order.port)}
        # The workers' rank 0 makes a store at that port; torchrun's own is elsewhere.
        environment["TORCHELASTIC_USE_AGENT_STORE"] = str(False)
        if int(environment.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
            environment.setdefault("NCCL_HOSTID", f"rank{self.rank}")
        command = [sys.executable, *order.arguments]
        watch = FailureWatch(self._store, f"{self._orders}/failed")
        end = run_workers(command, [environment], order.timeout_s, self.rank, watch.look)
        if end.exit_code:
            watch.report()
        self._store.set(f"{self._orders}/end/{self.rank}", json.dumps(asdict(end)))
        return end

    def _end_of(self, rank: int) -> Attempt:
        key = f"{self._orders}/end/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=PATIENCE_S))
        except dist.DistStoreError:
            return Attempt(TIME_UP, f"rank {rank} does not answer.", "")
        return Attempt(**json.loads(self._store.get(key)))

    def _wait_for(self, key: str) -> str:
        while True:
            try:
                self._store.wait([key], timedelta(seconds=PATIENCE_S))
            except dist.DistStoreError:
                continue
            return self._store.get(key).decode()


class FailureWatch:
    """Whether a worker of the cell has failed anywhere. Looked at now and then, so as not to disturb what is measured."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store = store
        self._key = key
        self._next_look = 0.0
        self._seen = False

    def report(self) -> None:
        self._store.set(self._key, "yes")

    def look(self) -> bool:
        if not self._seen and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._seen = bool(self._store.check([self._key]))
        return self._seen
