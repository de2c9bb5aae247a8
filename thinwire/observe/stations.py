"""Stations: the named ranges of a step, for torch.profiler or for a timer of one's own.

Cheap when nobody looks: one test of a list and one of a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd import profiler

HOOK = "thinwire::hook"
ENCODE = "thinwire::encode"
EXCHANGE = "thinwire::exchange"
DECODE = "thinwire::decode"
DRIVER = "thinwire::driver"
"""On CUDA the whole host work of a unit, on a thread of its own, with the others in it."""
STATIONS = (HOOK, ENCODE, EXCHANGE, DECODE, DRIVER)

Watcher = Callable[[str], AbstractContextManager[Any]]

_watchers: list[Watcher] = []
_NOTHING: AbstractContextManager[Any] = nullcontext()


def station(name: str) -> AbstractContextManager[Any]:
    """The range around one station's work; it may be entered on any thread."""
    if _watchers:
        return _watchers[-1](name)
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return _NOTHING


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Hand every station of this process to `watcher` for the length of the block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
