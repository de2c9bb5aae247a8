"""Which lane a case of a grid runs in: `make test` takes a few of each grid, `make slow` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case for `make slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """A grid: `make test` runs the cases that are kept, `make slow` the others."""
    return [case if kept(case) else slow(case) for case in cases]
