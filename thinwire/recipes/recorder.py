"""Recorder: what each step did, averaged over the workers and handed to the log a few steps at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.recipes.parallel import Replica, Workers
from thinwire.tools.clock import Mark
from thinwire.tools.metrics import MetricsLog

LOG_EVERY = 10
"""Steps whose losses are averaged over the workers in one go, so that looking does not slow the step down."""


@dataclass(frozen=True)
class Measured:
    """One step, before anybody has waited for its numbers."""

    loss: Tensor
    began: Mark
    ended: Mark
    exposed: tuple[Mark, Mark] | None
    wire_bytes: int
    lr: float


class StepRecorder:
    """Counts steps from the one a run begins or resumes at."""

    def __init__(
        self, label: str, replica: Replica, workers: Workers, log: MetricsLog, step: int = 0
    ) -> None:
        self.step = step
        self.milliseconds: list[float] = []
        self.exposed_milliseconds: list[float] = []
        self._label = label
        self._workers = workers
        self._log = log
        self._ledger = replica.ledgers()[workers.ranks[0]]
        self._sent_before = self._ledger.sent_bytes()
        self._began: Mark = Mark(workers.device)
        self._waiting: list[Measured] = []

    def begin_step(self) -> None:
        self._began = Mark(self._workers.device)

    def end_step(self, loss: Tensor, exposed: tuple[Mark, Mark] | None, lr: float) -> None:
        sent = self._ledger.sent_bytes()
        ended = Mark(self._workers.device)
        self._waiting.append(
            Measured(loss, self._began, ended, exposed, sent - self._sent_before, lr)
        )
        self._sent_before = sent
        self.step += 1
        if len(self._waiting) == LOG_EVERY:
            self.flush()

    def flush(self) -> None:
        """Collective: average the losses since the last flush and log their steps."""
        if not self._waiting:
            return
        losses = torch.stack([one.loss.double() for one in self._waiting])
        means = (self._workers.sum(losses) / self._workers.processes).tolist()
        first = self.step - len(self._waiting) + 1
        records = []
        for step, (one, loss) in enumerate(zip(self._waiting, means, strict=True), start=first):
            self.milliseconds.append(one.ended.ms_since(one.began))
            record = {
                "run": self._label,
                "event": "step",
                "step": step,
                "loss": loss,
                "lr": one.lr,
                "wire_bytes": one.wire_bytes,
                "ms": round(self.milliseconds[-1], 3),
            }
            if one.exposed is not None:
                computed, exchanged = one.exposed
                self.exposed_milliseconds.append(exchanged.ms_since(computed))
                record["exposed_ms"] = round(self.exposed_milliseconds[-1], 3)
            records.append(record)
        self._log.add(records)
        self._waiting.clear()
