from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """pools(3) is the session's pool of three workers."""
    alive: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        return alive.setdefault(world, Pool(world))

    yield get
    for pool in alive.values():
        pool.stop()
