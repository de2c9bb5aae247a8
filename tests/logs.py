"""What loggers say while a test looks on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def catch_warnings_of(name: str) -> Iterator[list[str]]:
    """What the logger of this name says."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    yield said
    logging.getLogger(name).removeHandler(handler)
