from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so it must be set before any is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

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
