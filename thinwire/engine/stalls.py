"""StallWatch: says which exchange waits, long before the group's timeout ends it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PATIENCE = 0.1
"""Of the group's timeout, after which an exchange that has not ended is worth a sentence."""


@dataclass(eq=False)
class Wait:
    """An exchange under way."""

    name: Callable[[], str]
    """Says in the words of a sentence which one it is."""
    is_over: Callable[[], bool]
    """Asked once, before anybody is told that it waits."""
    began: float


class StallWatch:
    """Warns once of every exchange that takes longer than a tenth of the timeout.

    A thread looks from time to time; it begins with the first exchange and costs a step next to nothing.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._waits: dict[Wait, None] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, name: Callable[[], str]) -> Iterator[None]:
        """For an exchange that ends with the block."""
        wait = self.begin(name, lambda: False)
        try:
            yield
        finally:
            self.end(wait)

    def begin(self, name: Callable[[], str], is_over: Callable[[], bool]) -> Wait:
        """For an exchange that goes on by itself, until `end`."""
        wait = Wait(name, is_over, time.monotonic())
        self._waits[wait] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="thinwire-stalls", daemon=True)
            self._thread.start()
        return wait

    def end(self, wait: Wait) -> None:
        self._waits.pop(wait, None)

    def _look(self) -> None:
        patience = PATIENCE * self.timeout
        while not self._closed.wait(patience / 4):
            for wait in list(self._waits):
                waited = time.monotonic() - wait.began
                if waited > patience:
                    self.end(wait)
                    if not wait.is_over():
                        self._say(wait.name(), waited)

    def _say(self, name: str, waited: float) -> None:
        logger.warning(
            "%s has waited for %.0f s: a worker hangs or is far behind, so look at the others; the group gives up after %.0f s",
            name,
            waited,
            self.timeout,
        )

    def close(self) -> None:
        self._closed.set()
        self._waits.clear()
