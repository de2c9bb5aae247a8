from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts a group of processes is no test for the quick lane."""
    for item in items:
        if "pools" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.workers)


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


@pytest.fixture(scope="session")
def sharded() -> Iterator[Pool]:
    """The session's four workers for models that are sharded over device meshes."""
    pool = Pool(4, keep_groups=True)
    yield pool
    pool.stop()
