from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As of the session's own pools: what starts processes is no test for the quick lane."""
    for item in items:
        if "workers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.workers)


@pytest.fixture(scope="package")
def workers() -> Iterator[Pool]:
    """Two workers of these tests alone: frameworks leave much behind in a process."""
    pool = Pool(2)
    yield pool
    pool.stop()
