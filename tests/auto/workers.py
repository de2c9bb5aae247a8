"""What the ranks of these tests run: a model whose gradients take their time on a link that is slowed down for real."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.exchange.requests import Collective


class Model(nn.Module):
    """Four wide layers: a quarter of a million parameters each."""

    def __init__(self, width: int = 512, layers: int = 4, entry: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Linear(width if entry is None else entry, width)
        self.layers = nn.Sequential(first, *(nn.Linear(width, width) for _ in range(layers - 1)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Brake:
    """Makes a handle's network as slow as a link of that many bytes per second; it may change in mid-run."""

    def __init__(self, handle: tw.Handle, bytes_per_s: float) -> None:
        network = handle.reducer.driver.network
        assert network is not None
        self.bytes_per_s = bytes_per_s
        self._world = network.place.world
        self._perform = network.perform
        network.perform = self.perform  # type: ignore[method-assign]
        self._travelling = threading.Lock()

    def perform(self, batch: Sequence[Any], what: str = "") -> list[Any]:
        sent = sum(one.sent_bytes(self._world) for one in batch if isinstance(one, Collective))
        with self._travelling:
            replies = self._perform(tuple(batch), what)
            time.sleep(sent / self.bytes_per_s)
        return replies

    def wait(self) -> None:
        """Until nothing travels."""
        with self._travelling:
            pass


class Job:
    """A model in training on this rank."""

    def __init__(
        self,
        rank: int,
        method: tw.Method | None,
        *,
        width: int = 512,
        momentum: float = 0.9,
        bucket_mb: float = 1.0,
        entry: int | None = None,
    ) -> None:
        """`entry` is the width of what goes in, if it is another one."""
        self.model = Model(width, entry=entry)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb)
        self.optimizer = torch.optim.SGD(
            self.ddp.parameters(), lr=0.01, momentum=momentum, weight_decay=1e-3
        )
        settings = {} if method is None else {"method": method}
        self.handle = tw.attach(self.ddp, optimizer=self.optimizer, **settings)
        self._generator = torch.Generator().manual_seed(rank)
        self._entry = width if entry is None else entry

    def step(self) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(16, self._entry, generator=self._generator)
        self.ddp(x).square().mean().backward()
        self.optimizer.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def auto(**settings: Any) -> tw.Auto:
    """Few steps of everything."""
    return tw.Auto(**{"measure_steps": 4, "trial_steps": 2, "window": 1000, **settings})
