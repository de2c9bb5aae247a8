"""Times of spans of work on a device: CUDA events, percentiles over laps, memory on top."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

WARMUP_LAPS = 3
LEAST_LAPS = 3
QUEUED_LAPS = 5
CYCLES_PER_MS = 2_000_000
"""At least as many as any GPU has, so that the device does not wake up too early."""
HEAD_START = 1.5
"""The host's lead over the device, as a multiple of what it took before."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One kind of span over all laps."""

    ms: float
    """Median."""
    ms_p20: float
    ms_p80: float
    host_ms: float
    """Median time until the host had issued everything; near `ms` the host is what is waited for."""
    device_ms: float | None
    """Median time if all launches are queued before the device begins: what the device itself needs. Only on CUDA."""
    peak_bytes: int | None
    """The most that was allocated on top of what was there when a span began; None where nobody counts."""
    laps: int


@dataclass
class _Lap:
    ms: float = 0.0
    host_ms: float = 0.0
    peak_bytes: int = 0


@dataclass
class Stopwatch:
    """Spans of one lap under the same name add up. Every span begins on an idle device."""

    device: torch.device
    lead_ms: dict[str, float] = field(default_factory=dict)
    """How long the device is kept from beginning a span, by name, so that the host can run ahead of it."""
    _lap: dict[str, _Lap] = field(default_factory=dict)
    _laps: list[dict[str, _Lap]] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        lap = self._lap.setdefault(name, _Lap())
        if self.device.type != "cuda":
            began = time.perf_counter()
            yield
            spent = 1e3 * (time.perf_counter() - began)
            lap.ms += spent
            lap.host_ms += spent
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        held = torch.cuda.memory_allocated(self.device)
        began = time.perf_counter()
        if self.lead_ms.get(name):
            torch.cuda._sleep(int(self.lead_ms[name] * CYCLES_PER_MS))
        first.record()
        yield
        last.record()
        lap.host_ms += 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize(self.device)
        lap.ms += first.elapsed_time(last)
        lap.peak_bytes = max(lap.peak_bytes, torch.cuda.max_memory_allocated(self.device) - held)

    def end_lap(self, *, keep: bool) -> None:
        """Close the lap; warm-up laps are not kept."""
        if keep:
            self._laps.append(self._lap)
        self._lap = {}

    def timings(self) -> dict[str, Timing]:
        names = dict.fromkeys(name for lap in self._laps for name in lap)
        return {name: self._timing([lap.get(name, _Lap()) for lap in self._laps]) for name in names}

    def _timing(self, laps: list[_Lap]) -> Timing:
        times = [lap.ms for lap in laps]
        low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
        return Timing(
            ms=statistics.median(times),
            ms_p20=low,
            ms_p80=high,
            host_ms=statistics.median(lap.host_ms for lap in laps),
            device_ms=None,
            peak_bytes=max(lap.peak_bytes for lap in laps) if self.device.type == "cuda" else None,
            laps=len(laps),
        )


def time_laps(
    lap: Callable[[Stopwatch], None], device: torch.device, *, repeats: int, seconds: float
) -> dict[str, Timing]:
    """Run `lap` until there are `repeats` of it or `seconds` are over, but a few times at least.

    The first laps are not counted: they build tables, compile kernels and fill memories.
    """
    watch = Stopwatch(device)
    began = time.monotonic()
    for _ in range(WARMUP_LAPS):
        lap(watch)
        watch.end_lap(keep=False)
        if time.monotonic() - began > seconds:
            break
    began = time.monotonic()
    for done in range(max(repeats, LEAST_LAPS)):
        if done >= LEAST_LAPS and time.monotonic() - began > seconds:
            break
        lap(watch)
        watch.end_lap(keep=True)
    timings = watch.timings()
    if device.type != "cuda":
        return timings
    alone = time_device(lap, device, {name: timing.host_ms for name, timing in timings.items()})
    return {name: replace(timing, device_ms=alone[name]) for name, timing in timings.items()}


def time_device(
    lap: Callable[[Stopwatch], None], device: torch.device, host_ms: dict[str, float]
) -> dict[str, float]:
    """Median times of the device alone; where the host waits for it in between, that wait is in them."""
    watch = Stopwatch(device, {name: HEAD_START * ms for name, ms in host_ms.items()})
    for _ in range(QUEUED_LAPS):
        lap(watch)
        watch.end_lap(keep=True)
    return {name: timing.ms for name, timing in watch.timings().items()}
