"""BucketCoalescer: neighbouring buckets that travel together.

A collective costs its latency whatever it carries, and a compressed bucket is small: a network of 10 Gbit/s is idle most of the
time if every bucket of 25 MB sends its 1 % by itself. So the programs of neighbouring buckets wait until together they have
something to send, and then run side by side: what they ask for in the same round is one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.futures import Future

from thinwire.engine.drivers import Driver, fail
from thinwire.engine.fusing import fuse_requests
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import Program, together

COALESCE_BYTES = 512 << 10
"""Bytes a rank sends; less than this is mostly latency on any network that needs compression."""


@dataclass(frozen=True, eq=False)
class PendingBucket:
    """A bucket that is encoded and waits for others."""

    program: Program[None]
    futures: Sequence[Future[Any]]
    title: str


class BucketCoalescer:
    """Starts programs in the order they come, several at a time.

    Buckets leave as soon as together they send `enough` bytes. What leaves together is a function of sizes, which are the
    same on all ranks. `adapt` is applied to every program before it is started.
    """

    def __init__(
        self, driver: Driver, enough: int, adapt: Callable[[Program], Program] | None = None
    ) -> None:
        self._driver = driver
        self.enough = enough
        self._adapt = adapt or (lambda program: program)
        self._pending: list[PendingBucket] = []
        self._nbytes = 0.0
        self._companions: list[PendingBucket] = []

    def add(
        self,
        program: Program[None],
        nbytes: float,
        futures: Sequence[Future[Tensor]],
        title: str = "",
    ) -> None:
        """Have the program run, some time after enough others have come or `flush` was called.

        The program fulfils the futures. If it breaks off they end with the error. `title` names it to the user.
        """
        self._pending.append(PendingBucket(program, futures, title))
        self._nbytes += nbytes
        if self._nbytes >= self.enough:
            self.flush()

    def accompany(self, program: Program[Any], future: Future[Any], title: str) -> None:
        """Have a small program, which is no bucket's, leave with the next ones; `future` gets its result."""

        def run_it() -> Program[None]:
            future.set_result((yield from program))

        self._companions.append(PendingBucket(run_it(), [future], title))

    def flush(self) -> None:
        """Start everything that waits."""
        buckets = self._pending + self._companions
        self._pending, self._companions, self._nbytes = [], [], 0.0
        if not buckets:
            return
        programs = [bucket.program for bucket in buckets]
        program = programs[0] if len(programs) == 1 else fuse_requests(together(programs))

        def break_off(done: Future[None]) -> None:
            try:
                done.value()
            except Exception as error:
                _fail(buckets, error)

        more = f" and {len(buckets) - 1} more buckets" if len(buckets) > 1 else ""
        started = self._driver.start(self._adapt(program), None, buckets[0].title + more)
        started.add_done_callback(break_off)

    def abandon(self) -> None:
        """Drop everything that waits: its step broke off before the last bucket came, and has been settled."""
        buckets, self._pending, self._nbytes = self._pending, [], 0.0
        _fail(buckets, ExchangeError("the step ended before its last bucket came"))


def _fail(buckets: Sequence[PendingBucket], error: Exception) -> None:
    for bucket in buckets:
        for future in bucket.futures:
            fail(future, error)
