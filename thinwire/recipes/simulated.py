"""Simulated workers of a recipe: all data-parallel workers in this process, on one device (`--simulate-workers`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from thinwire.observe import Ledger, Stats
from thinwire.plan import PlanReport, Rule
from thinwire.recipes.examples import Batch
from thinwire.recipes.kinds import Carry
from thinwire.recipes.parallel import Attachment, Replica, Workers
from thinwire.recipes.step import Step
from thinwire.tools.clock import Mark
from thinwire.validate import check_positive_int


class SimulatedWorkers(Workers):
    """`count` workers in this one process, which is the only one.

    `graph` replays each worker's forward and backward as a CUDA graph where that works.
    """

    process = 0
    processes = 1

    def __init__(self, count: int, device: torch.device, *, graph: bool = False) -> None:
        check_positive_int("simulate_workers", count)
        self.world = count
        self.ranks = range(count)
        self.device = device
        self.graph = graph and device.type == "cuda"

    def attach(self, attachment: Attachment) -> Replica:
        return SimulatedReplica(attachment, self)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def sum(self, values: Tensor) -> Tensor:
        return values


class SimulatedReplica(Replica):
    """One model that all workers train in turn."""

    def __init__(
        self, attachment: Attachment, workers: SimulatedWorkers, policy: Sequence[Rule] = ()
    ) -> None:
        self.model = attachment.model
        self.simulation = tw.simulate(
            attachment.model,
            attachment.method,
            workers=workers.world,
            policy=policy,
            optimizer=attachment.optimizer,
            grad_scaler=attachment.scaler,
            deterministic=attachment.deterministic,
            graph=workers.graph,
        )
        self._step: Step | None = None

    def backward(self, step: Step) -> tuple[Mark, Mark] | None:
        self._step = step
        for micro in range(step.micro_batches):
            batches = step.batches(self.simulation.ranks, micro)
            for worker, batch in zip(self.simulation.ranks, batches, strict=True):
                with self.simulation.worker(worker):
                    step.seed_forward(worker, micro)
                    _, loss, carry = self.simulation.run(self._forward, batch, step.carries[worker])
                step.losses.append(loss)
                step.carries[worker] = carry
        self.exchange(step)
        return None

    def _forward(self, batch: Batch, carry: Carry) -> tuple[Tensor, Tensor, Carry]:
        """(what to call backward() on, loss, carry); what a graph repeats, so nothing is noted here."""
        step = self._step
        assert step is not None
        with step.precision.autocast():
            loss, carry = step.kind.loss(self.model, batch, carry)
        return step.precision.scaler.scale(loss / step.micro_batches), loss, carry

    def exchange(self, step: Step) -> None:
        """Average the gradients that the workers have by now."""
        self.simulation.exchange()

    def share_buffers(self) -> None:
        """They are worker 0's already."""

    def stats(self) -> Stats:
        return self.simulation.stats()

    def log(self, writer: Any) -> None:
        self.simulation.handles[0].log(writer)

    def plan(self) -> PlanReport:
        return self.simulation.plan()

    def costs(self) -> dict[str, Any]:
        return asdict(self.simulation.report())

    def ledgers(self) -> dict[int, Ledger]:
        return {handle.rank: handle.ledger for handle in self.simulation.handles}

    def state_dict(self) -> dict[str, Any]:
        return self.simulation.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.simulation.load_state_dict(state)

    def close(self) -> None:
        self.simulation.close()
