"""Local steps of many workers in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.adapters.local_checks import check_local
from thinwire.adapters.local_rounds import LocalRounds
from thinwire.adapters.local_settings import LocalSettings
from thinwire.engine.drivers import Driver
from thinwire.engine.virtual import VirtualCluster
from thinwire.errors import UsageError
from thinwire.methods.base import Dense, Method


class LocalSimulation:
    """As many workers as there are models, each with an optimizer of its own; `tw.LocalSteps.simulate` makes it.

    `step` comes after every inner step of all of them, `finish` at the end.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer | Sequence[Optimizer]],
        method: Method | None = None,
        **settings: Any,
    ) -> None:
        if len(models) != len(optimizers) or not models:
            raise UsageError(
                f"there are {len(models)} models and {len(optimizers)} optimizers; every worker needs one of each"
            )
        local = LocalSettings(**settings)
        for model, optimizer in zip(models, optimizers, strict=True):
            check_local(model, optimizer, method or Dense(), local)
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        self._cluster = VirtualCluster(len(models))
        self.workers = [
            LocalRounds(model, optimizer, method or Dense(), _given(driver), local)
            for model, optimizer, driver in zip(
                models, optimizers, self._cluster.drivers, strict=True
            )
        ]

    @torch.no_grad()
    def step(self) -> None:
        """All workers have taken an inner step."""
        for worker in self.workers:
            worker.begin_due()
        self._cluster.run()
        for worker in self.workers:
            worker.finish_due()

    def finish(self) -> None:
        """All workers come together: they have the same parameters afterwards."""
        for _ in zip(*(worker.last_rounds() for worker in self.workers), strict=True):
            self._cluster.run()

    def state_dict(self) -> list[dict[str, Any]]:
        return [worker.state_dict() for worker in self.workers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        for worker, state in zip(self.workers, states, strict=True):
            worker.load_state_dict(state)


def _given(driver: Driver) -> Callable[[torch.device], Driver]:
    return lambda device: driver
