"""What the micro-benchmarks share: where they run, how a call is timed, how rows become CSV."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import torch

from thinwire.errors import UsageError
from thinwire.tools.clock import wait_for
from thinwire.tools.files import format_csv
from thinwire.tools.provenance import cpu_name, describe_origin
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import NewFile


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Where a micro-benchmark runs, how often, and where its rows go."""

    device: Annotated[str, "cpu|cuda"] = "cpu"
    """cpu uses one thread."""
    repeats: int = 5
    """Timed calls; the median is shown."""
    csv: NewFile | None = None
    """Write the rows there."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_device_name(self.device)
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}; it must be at least 1")


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device of that name and what it is called in a table; CPU times are those of one thread."""
    check_device_name(name)
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is 'cuda', but torch finds no CUDA device here; use cpu")
    torch.set_num_threads(1)
    hardware = torch.cuda.get_device_name() if name == "cuda" else f"one thread of {cpu_name()}"
    return torch.device(name), hardware


def check_device_name(name: str) -> None:
    """Whether or not there is one here."""
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}; it must be cpu or cuda")


def time_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of one call, the device's work included."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        wait_for(device)
        times.append(1e3 * (time.perf_counter() - start))
    # The first call builds tables that later calls reuse.
    return statistics.median(times[1:])


def to_csv(rows: Sequence[Any], hardware: str) -> str:
    """Dataclass rows with date, versions, hardware and commit on each, so that files can be joined."""
    origin = describe_origin()
    where = {
        "date": origin["date"],
        "commit": origin["commit"],
        "thinwire": origin["versions"]["thinwire"],
        "torch": origin["versions"]["torch"],
        "hardware": hardware,
    }
    columns = [*(field.name for field in fields(rows[0])), *where]
    return format_csv(columns, [{**asdict(row), **where} for row in rows], digits=4)
