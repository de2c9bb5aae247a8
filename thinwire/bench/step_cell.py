"""StepCell: one measurement of the step benchmark, and the grid it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.bench.anchors import ANCHORS, RATE_FREE, build_step_method, is_known
from thinwire.bench.models import find_model
from thinwire.errors import UsageError
from thinwire.lab.rates import UNSHAPED, format_rate, parse_rate
from thinwire.validate import check_choice, check_positive_int, check_positive_number

ANY_RATE = "any"
"""The rate of what sends nothing: the link does not matter."""
LOCAL = "local"
"""The rate of plain processes on this machine, without a lab."""
CLUSTER = "cluster"
"""The rate of the network that a launcher's machines have."""
UNRATED = {ANY_RATE: "any link", LOCAL: "local processes", CLUSTER: "this cluster"}
"""What is no number, and its name for people."""

KEY = (
    "model",
    "method",
    "rate",
    "workers",
    "device",
    "amp",
    "batch",
    "length",
    "bucket_mb",
    "density",
    "rank",
)
"""What makes two measurements the same one."""


@dataclass(frozen=True, kw_only=True)
class StepCell:
    """A training step of one model with one method on one network."""

    model: str
    method: str
    """A name of thinwire's registry or an anchor."""
    rate: str = LOCAL
    workers: int = 2
    device: str = "cpu"
    amp: str = "none"
    """"bf16" runs forward and loss under autocast."""
    batch: int
    """Samples per worker and step."""
    length: int | None = None
    """Tokens per sample."""
    bucket_mb: float | None = None
    """DDP's bucket size; None is DDP's own (1 MiB, then 25 MiB), 0 is one bucket per tensor."""
    density: float | None = None
    rank: int | None = None
    """Of the low-rank methods."""
    steps: int = 20
    """Timed steps, fewer where they would take longer than `seconds`."""
    seconds: float = 5.0

    def __post_init__(self) -> None:
        find_model(self.model)
        for field in ("workers", "batch", "steps"):
            check_positive_int(field, getattr(self, field))
        check_positive_number("seconds", self.seconds)
        check_choice("device", self.device, ("cpu", "cuda"))
        check_choice("amp", self.amp, ("none", "bf16"))
        if self.rate not in UNRATED:
            parse_rate(self.rate)
        if self.bucket_mb is not None and not self.bucket_mb >= 0:
            raise UsageError(f"bucket_mb is {self.bucket_mb!r}; it must be 0 or more")

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in KEY)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def describe(self) -> str:
        extras = [f"{self.workers} workers", f"batch {self.batch}"]
        extras += [f"density {self.density:g}"] if self.density is not None else []
        extras += [f"rank {self.rank}"] if self.rank is not None else []
        extras += [f"buckets {self.bucket_mb:g} MB"] if self.bucket_mb is not None else []
        rate = UNRATED.get(self.rate, self.rate)
        return f"{self.model}, {self.method}, {rate} ({', '.join(extras)})"


def plan_cell(
    model: str,
    method: str,
    *,
    rate: str = LOCAL,
    batch: int | None = None,
    length: int | None = None,
    density: float | None = None,
    rank: int | None = None,
    **settings: Any,
) -> StepCell:
    """A cell whose open settings are filled in: the model's own batch, the method's own density and rank."""
    spec = find_model(model)
    built = build_step_method(method, density, rank)
    if method in RATE_FREE and rate != CLUSTER:
        # A cluster's machines are others than this one.
        rate = ANY_RATE
    elif rate not in UNRATED:
        rate = format_rate(parse_rate(rate))
    return StepCell(
        model=model,
        method=method,
        rate=rate,
        batch=batch or spec.batch,
        length=length or spec.length,
        density=getattr(built, "density", None),
        rank=getattr(built, "rank", None),
        **settings,
    )


def plan_grid(
    *,
    models: Sequence[str],
    methods: Sequence[str],
    rates: Sequence[str],
    workers: Sequence[int],
    **settings: Any,
) -> list[StepCell]:
    """Every combination, each once; what others are compared with comes first."""
    for method in methods:
        if not is_known(method):
            build_step_method(method, None, None)  # raises the sentence that lists the names
    order = sorted(dict.fromkeys(methods), key=lambda name: name not in ANCHORS)
    return unique(
        plan_cell(model, method, rate=rate, workers=count, **settings)
        for model in models
        for count in workers
        for rate in rates or [LOCAL]
        for method in order
    )


def unique(cells: Iterable[StepCell]) -> list[StepCell]:
    """Each cell once, where it first stood."""
    return list({cell.key: cell for cell in cells}.values())


def lab_rate(cell: StepCell) -> str:
    """The rate to build the cell's lab with."""
    return UNSHAPED if cell.rate == ANY_RATE else cell.rate
