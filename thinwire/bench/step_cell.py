"""StepCell: one measurement of the step benchmark, and the grid it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from thinwire.bench.anchors import ANCHORS, HSDP_ANCHORS, RATE_FREE, build_step_method
from thinwire.bench.local_methods import LOCAL_METHODS
from thinwire.bench.models import find_model
from thinwire.errors import UsageError
from thinwire.lab.rates import UNSHAPED, format_rate, parse_latency, parse_rate
from thinwire.report.step_rows import UNRATED
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import NotNegative, Positive, PositiveNumber

ANY_RATE = "any"
"""The rate of what sends nothing: the link does not matter."""
LOCAL = "local"
"""The rate of plain processes on this machine, without a lab."""
CLUSTER = "cluster"
"""The rate of the network that a launcher's machines have."""

KEY = (
    "model", "method", "rate", "workers", "device", "amp", "batch", "length", "bucket_mb", "density", "rank",
    "every", "parallel", "latency",
)  # fmt: skip
"""What makes two measurements the same one."""


@dataclass(frozen=True, kw_only=True)
class StepCell:
    """A training step of one model with one method on one network."""

    model: str
    method: str
    """The name of a method or an anchor."""
    rate: str = LOCAL
    workers: Positive = 2
    device: Literal["cpu", "cuda"] = "cpu"
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs forward and loss under autocast."""
    batch: Positive
    """Samples per worker and step."""
    length: int | None = None
    """Tokens per sample."""
    bucket_mb: NotNegative | None = None
    """DDP's bucket size; its own (1 MiB, then 25 MiB) unless given, 0 is one bucket per tensor."""
    density: Annotated[float | None, "FRACTION"] = None
    """Fraction kept by sparse methods."""
    rank: int | None = None
    """Rank of low-rank methods."""
    every: Positive | None = None
    """Inner steps between two rounds of local steps."""
    parallel: Literal["ddp", "hsdp"] = "ddp"
    """hsdp shards the model over the two workers of each host and copies it between hosts."""
    latency: Annotated[str | None, "TIME"] = None
    """Delay added one way between hosts, such as 50ms; needs rates."""
    shapes: str | None = None
    """A hash of what the model is made of (`model_shapes`); None where nobody looked."""
    steps: Positive = 20
    """Timed steps per row."""
    seconds: PositiveNumber = 5.0
    """Fewer steps where they would take longer than this."""

    def __post_init__(self) -> None:
        check_fields(self)
        find_model(self.model)
        if self.rate not in UNRATED:
            parse_rate(self.rate)
        if self.latency is not None:
            parse_latency(self.latency)
        if self.workers % self.per_host:
            raise UsageError(
                f"workers is {self.workers}; with parallel=hsdp it must be a multiple of {self.per_host}"
            )
        anchors = {"ddp": ANCHORS, "hsdp": HSDP_ANCHORS}
        if self.method in {*ANCHORS, *HSDP_ANCHORS} - {*anchors[self.parallel]}:
            raise UsageError(
                f"method is {self.method!r}, which is no anchor of parallel={self.parallel}; it has "
                f"{', '.join(anchors[self.parallel])}"
            )
        if self.every is not None and self.parallel != "ddp":
            raise UsageError(
                f"method is {self.method!r}, which is measured with parallel=ddp only; leave {self.parallel} out"
            )

    @property
    def per_host(self) -> int:
        """Workers that share a host, with a link to the others."""
        return 2 if self.parallel == "hsdp" else 1

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in KEY)

    @property
    def setup(self) -> tuple[Any, ...]:
        """What cells have in common that can be measured one after the other by the same processes."""
        own = (self.model, self.rate, self.workers, self.device, self.amp, self.batch, self.length)
        return (*own, self.parallel, self.latency)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def describe(self) -> str:
        extras = [f"{self.workers} workers", f"batch {self.batch}"]
        extras += [f"density {self.density:g}"] if self.density is not None else []
        extras += [f"rank {self.rank}"] if self.rank is not None else []
        extras += [f"every {self.every}"] if self.every is not None else []
        extras += [f"buckets {self.bucket_mb:g} MB"] if self.bucket_mb is not None else []
        extras += [f"latency {self.latency}"] if self.latency is not None else []
        extras += [self.parallel] if self.parallel != "ddp" else []
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
    every: int | None = None,
    **settings: Any,
) -> StepCell:
    """A cell whose open settings are filled in: the model's own batch, the method's own density and rank."""
    spec = find_model(model)
    built = build_step_method(method, density, rank, every)
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
        every=getattr(built, "every", None),
        **settings,
    )


def plan_grid(
    *,
    models: Sequence[str],
    methods: Sequence[str],
    rates: Sequence[str],
    workers: Sequence[int],
    every: Sequence[int] = (),
    **settings: Any,
) -> list[StepCell]:
    """Every combination, each once; what others are compared with comes first. `every` is for local steps."""
    known = (*ANCHORS, *HSDP_ANCHORS)
    order = sorted(dict.fromkeys(methods), key=lambda name: name not in known)
    return unique(
        plan_cell(model, method, rate=rate, workers=count, every=between, **settings)
        for model in models
        for count in workers
        for rate in rates or [LOCAL]
        for method in order
        for between in ((method in LOCAL_METHODS and every) or (None,))
    )


def unique(cells: Iterable[StepCell]) -> list[StepCell]:
    """Each cell once, where it first stood."""
    return list({cell.key: cell for cell in cells}.values())


def lab_rate(cell: StepCell) -> str:
    """The rate to build the cell's lab with."""
    return UNSHAPED if cell.rate == ANY_RATE else cell.rate
