"""Clock: marks in time, where the work is done. On CUDA an event in the stream, so that looking does not wait."""

from __future__ import annotations

import time

import torch


class Mark:
    """A moment on a device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def ms_since(self, earlier: Mark) -> float:
        """Milliseconds between two marks of one device; on CUDA it waits until this one is reached."""
        if self._event is None or earlier._event is None:
            return 1000 * (self._seconds - earlier._seconds)
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event))


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
