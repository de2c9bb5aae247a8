"""Clock: marks in time, where the work is done. On CUDA an event in the stream, so that looking does not wait."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch


class Mark(ABC):
    """A moment."""

    @abstractmethod
    def ms_since(self, earlier: Mark) -> float:
        """Milliseconds between two marks of one clock; on CUDA it waits until this one is reached."""


class HostMark(Mark):
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return 1000 * (self.seconds - earlier.seconds)


class StreamMark(Mark):
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, StreamMark)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event))


def mark(device: torch.device) -> Mark:
    """Now, on the current stream of that device."""
    return StreamMark() if device.type == "cuda" else HostMark()
