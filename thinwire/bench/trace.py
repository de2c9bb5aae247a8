"""Where a step's time goes: a timer of the stations, and one Perfetto file per rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from thinwire.observe.stations import STATIONS, watch

TRACED_STEPS = 3


class StationTimer:
    """Adds up the time of every station: on CUDA between events on its stream, else on its thread."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._lock = threading.Lock()

    def __call__(self, name: str) -> _Span:
        return _Span(self, name)

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, began: Any, ended: Any) -> None:
        with self._lock:
            self._spans.append((name, began, ended))

    def milliseconds(self) -> dict[str, float]:
        """Total per station; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        totals = dict.fromkeys(STATIONS, 0.0)
        for name, began, ended in self._spans:
            totals[name] += began.elapsed_time(ended) if self._cuda else 1000 * (ended - began)
        return totals


class _Span:
    def __init__(self, timer: StationTimer, name: str) -> None:
        self.timer = timer
        self.name = name
        self.began: Any = None

    def __enter__(self) -> None:
        self.began = self.timer.mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.timer.add(self.name, self.began, self.timer.mark())


def time_stations(
    run_step: Callable[[], None], device: torch.device, steps: int
) -> dict[str, float]:
    """Milliseconds per step in each station, measured in steps of their own: the marks cost time too."""
    timer = StationTimer(device)
    with watch(timer):
        for _ in range(steps):
            run_step()
    return {name: total / steps for name, total in timer.milliseconds().items()}


def write_trace(run_step: Callable[[], None], device: torch.device, path: Path) -> None:
    """Profile a few steps into a Chrome trace, which https://ui.perfetto.dev opens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    # The exchange has a thread of its own, which the profiler would not look at otherwise.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=kinds, experimental_config=every_thread) as profile:
        for step in range(TRACED_STEPS):
            with torch.profiler.record_function(f"step {step}"):
                run_step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
