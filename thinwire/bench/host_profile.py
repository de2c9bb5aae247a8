"""Where the host spends a step: time of every phase, on the thread that spent it.

A phase's own time does not count what is inside another phase: encoding inside a hook is encoding's. On CUDA a phase is what
the host needs to ask for the work, and the device does it later; there the host's share is what is seen here.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.bench.step_cell import StepCell
from thinwire.bench.step_places import trace_prefix
from thinwire.observe import HOOK, watch

PROFILED_STEPS = 12
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = {
    FORWARD: "forward and loss",
    BACKWARD: "backward, and waiting at its end",
    "hook": "hook, beside what is below",
    "driver": "driver: streams, and what is kept",
    "encode": "encode",
    "exchange": "collectives, and waiting for them",
    "decode": "decode",
    OPTIMIZER: "optimizer",
}
"""In the order of a step, and what each is."""
Span = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Phase:
    """What one phase takes on one thread, in microseconds per step."""

    name: str
    thread: str
    wall_us: float
    busy_us: float
    """Processor time of the thread; the rest of the wall time it waited, or was not let on a processor."""
    calls: float
    """Per step."""


@dataclass(frozen=True)
class HostProfile:
    """One cell's host."""

    cell: str
    steps: int
    buckets: float
    """Per step: how often DDP called the hook."""
    step_us: float
    phases: Sequence[Phase]


class HostClock:
    """Adds up the own time of phases, by thread."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        stack = self._local.__dict__.setdefault("stack", [])
        inner = [0.0, 0.0]
        stack.append(inner)
        wall, busy = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took = time.perf_counter() - wall, time.thread_time() - busy
            stack.pop()
            if stack:
                for place in (0, 1):
                    stack[-1][place] += took[place]
            key = name.rpartition(":")[2], name_thread(threading.current_thread().name)
            with self._lock:
                sums = self._spent.setdefault(key, [0.0, 0.0, 0])
                sums[0] += took[0] - inner[0]
                sums[1] += took[1] - inner[1]
                sums[2] += 1

    def phases(self, steps: int) -> list[Phase]:
        order = list(PHASES)
        # A step ends before the thread of the exchange is through with its last bucket.
        with self._lock:
            spent = dict(self._spent)
        found = [
            Phase(name, thread, 1e6 * wall / steps, 1e6 * busy / steps, calls / steps)
            for (name, thread), (wall, busy, calls) in spent.items()
        ]
        return sorted(found, key=lambda phase: (order.index(phase.name), phase.thread))


def name_thread(name: str) -> str:
    """A thread that torch has made has no name of its own: it runs backward on a GPU."""
    known = {"MainThread": "main", "thinwire-exchange": "exchange"}
    return known.get(name, "autograd" if name.startswith("Dummy") else name)


def no_span(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def profile_steps(
    cell: StepCell, step: Callable[[Span], None], steps: int = PROFILED_STEPS
) -> HostProfile:
    """Run `step(span)` so often, with every station watched; `span` is for the phases that the step itself knows."""
    clock = HostClock()
    times = []
    with watch(clock):
        for _ in range(steps):
            began = time.perf_counter()
            step(clock)
            times.append(time.perf_counter() - began)
    phases = clock.phases(steps)
    hook = HOOK.rpartition(":")[2]
    buckets = sum(phase.calls for phase in phases if phase.name == hook)
    return HostProfile(cell.describe(), steps, buckets, 1e6 * statistics.median(times), phases)


# -- files -----------------------------------------------------------------------------------------------------


def profile_file(folder: Path, cell: StepCell) -> Path:
    return Path(f"{trace_prefix(folder, cell)}-host.json")


def write_profile(path: Path, profile: HostProfile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=1) + "\n")


def read_profile(path: Path) -> HostProfile:
    content: Mapping[str, Any] = json.loads(path.read_text())
    phases = [Phase(**phase) for phase in content["phases"]]
    return HostProfile(**{**content, "phases": phases})
