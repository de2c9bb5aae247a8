"""Where a step's time goes: a timer of the stations, and one Perfetto file per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from thinwire.bench.host_profile import Span
from thinwire.observe import STATIONS, watch
from thinwire.tools.clock import Mark, wait_for

TRACED_STEPS = 3


class StationTimer:
    """Adds up the time of every station, on its device's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = Mark(self._device)
        try:
            yield
        finally:
            with self._lock:
                self._spans.append((name, began, Mark(self._device)))

    def milliseconds(self) -> dict[str, float]:
        """Total per station; waits for the device."""
        wait_for(self._device)
        totals = dict.fromkeys(STATIONS, 0.0)
        for name, began, ended in self._spans:
            totals[name] += ended.ms_since(began)
        return totals


def time_stations(
    run_step: Callable[[], None], device: torch.device, steps: int
) -> dict[str, float]:
    """Milliseconds per step in each station, measured in steps of their own: the marks cost time too."""
    timer = StationTimer(device)
    with watch(timer):
        for _ in range(steps):
            run_step()
    return {name: total / steps for name, total in timer.milliseconds().items()}


def write_trace(
    step: Callable[[Span], None], device: torch.device, path: Path, steps: int = TRACED_STEPS
) -> None:
    """Profile a few steps into a Chrome trace, which https://ui.perfetto.dev opens; the step's own phases have ranges too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    # The exchange has a thread of its own, which the profiler would not look at otherwise.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=kinds, experimental_config=every_thread) as profile:
        for number in range(steps):
            with torch.profiler.record_function(f"step {number}"):
                step(torch.profiler.record_function)
        wait_for(device)
    profile.export_chrome_trace(str(path))
