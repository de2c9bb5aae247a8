"""Signals that end a process unwind its stack, so that cleaning up happens, and never twice."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack as Ctrl-C does, where nobody handles them yet.

    Only the main thread can; elsewhere this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def unwind(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child must not clean up what its parent uses
            os._exit(128 + number)
        raise SystemExit(128 + number)

    replaced: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            replaced[number] = signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back in this thread and in the children it forks; they arrive afterwards."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
