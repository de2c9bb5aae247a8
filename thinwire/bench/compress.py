"""The compression benchmark: what a whole model's gradient costs to encode and decode, against one pass over memory.

Needs torch alone (and transformers or torchvision for their models); the command line is in `compress_command`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from thinwire.bench.compress_anchors import ANCHORS
from thinwire.bench.compress_fleet import DECODE, ENCODE, Fleet
from thinwire.bench.compress_layout import describe_model, distinct_shapes, keep_compressible
from thinwire.bench.compress_rows import (
    ANCHOR,
    FLOOR,
    THINWIRE,
    CompressBook,
    CompressCase,
    CompressRow,
    case_key,
)
from thinwire.bench.compress_timing import Stopwatch, Timing, time_laps
from thinwire.bench.measure import choose_device
from thinwire.errors import JobError, UsageError
from thinwire.layout import ParameterInfo
from thinwire.tools.books import FAILED, OK
from thinwire.tools.methods import build_method, find_preset, keep_taken
from thinwire.tools.provenance import describe_origin
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import Positive, PositiveNumber
from thinwire.tools.settings.names import check_name
from thinwire.validate import check_density

DEFAULT_METHODS = ("adtopk", "topk", "dgc", "gaussiank", "powersgd", "acpsgd")
"""The methods that the anchors are the published forms of."""
TENSOR_METHODS = ("adtopk", "topk")
TENSOR_ANCHORS = ("torch-row-topk", "torch-topk")
TENSOR_SECONDS = 0.2
FLOOR_BYTES = 12
"""Per element: read gradient and residual, write residual."""
COPY = "copy"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How it is measured."""

    world: Positive = 4
    """Workers: rank 0 is timed, and decodes the payloads of all."""
    bucket_mb: PositiveNumber | None = None
    """DDP's bucket size; its own (1 MiB, then 25 MiB) unless given, one bucket if it is more than the model has."""
    repeats: Positive = 20
    """Timed laps per row."""
    seconds: PositiveNumber = 2.0
    """Fewer laps where they would take longer than this."""
    tensors: bool = True
    """Measure every distinct tensor by itself too, per row and globally, at the first density."""

    def __post_init__(self) -> None:
        check_fields(self)


def measure_compress(
    models: Sequence[str],
    densities: Sequence[float],
    device: str,
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    anchors: Sequence[str] = tuple(ANCHORS),
    settings: CompressSettings | None = None,
    out: Path | None = None,
    deadline: float | None = None,
    retry_failed: bool = False,
    say: Say = print,
) -> list[CompressRow]:
    """Measure what the folder `out` does not hold yet, saving as it goes; return all rows of the folder.

    `deadline` is a time of `time.monotonic()`: what has not begun by then is left for the next run. The floor is
    measured in every run, so that the ratios of a run are its own.
    """
    settings = settings or CompressSettings()
    where, hardware = choose_device(device)
    # With its number, as the buckets of a real model have it.
    where = torch.empty(0, device=where).device
    shapes = {model: describe_model(model) for model in models}
    cases = plan_cases(shapes, densities, methods, anchors, tensors=settings.tensors)
    bench = Bench(shapes, where, hardware, settings, CompressBook(out))
    for count, case in enumerate(cases, start=1):
        if bench.has(case, retry_failed):
            continue
        if deadline is not None and time.monotonic() > deadline:
            say(f"[{count}/{len(cases)}] time is up; the rest is left for the next run")
            break
        rows = bench.run(case)
        say(f"[{count}/{len(cases)}] {case.describe()}: {summarise(rows)}")
        bench.check_device()
    return bench.book.rows


def plan_cases(
    shapes: dict[str, list[ParameterInfo]],
    densities: Sequence[float],
    methods: Sequence[str],
    anchors: Sequence[str],
    *,
    tensors: bool,
) -> list[CompressCase]:
    """The floors first, then whole models, density by density; single tensors last, at the first density only.

    What has no density is there once.
    """
    for field, given in (("model", shapes), ("density", densities)):
        if not given:
            raise UsageError(f"{field} is empty; name at least one")
    for density in densities:
        check_density("density", density)
    for name in methods:
        find_preset(name)
    for name in anchors:
        check_name("anchor", name, ANCHORS)
    cases = [
        CompressCase(model=model, tensor=None, density=None, kind=FLOOR, name=COPY)
        for model in shapes
    ]
    for density in densities:
        for model in shapes:
            cases += _grid(model, None, density, methods, anchors)
    for model, infos in shapes.items() if tensors else ():
        for info in distinct_shapes(keep_compressible(infos)):
            ours = [name for name in TENSOR_METHODS if name in methods]
            theirs = [name for name in TENSOR_ANCHORS if name in anchors]
            cases += _grid(model, _label(info), densities[0], ours, theirs)
    return list(dict.fromkeys(cases))


def _grid(
    model: str, tensor: str | None, density: float, methods: Sequence[str], anchors: Sequence[str]
) -> Iterator[CompressCase]:
    named = [(THINWIRE, name, find_preset(name).takes("density")) for name in methods]
    named += [(ANCHOR, name, ANCHORS[name].takes_density) for name in anchors]
    for kind, name, takes in named:
        chosen = density if takes else None
        yield CompressCase(model=model, tensor=tensor, density=chosen, kind=kind, name=name)


def _label(info: ParameterInfo) -> str:
    return "x".join(map(str, info.shape))


class Bench:
    """One run: the shapes, the device, the rows, and the floors measured so far."""

    def __init__(
        self,
        shapes: dict[str, list[ParameterInfo]],
        device: torch.device,
        hardware: str,
        settings: CompressSettings,
        book: CompressBook,
    ) -> None:
        self.shapes = shapes
        self.device = device
        self.hardware = hardware
        self.settings = settings
        self.book = book
        self._floors: dict[str, float] = {}
        origin = describe_origin()
        versions = dict(origin["versions"])
        if device.type == "cuda":
            versions["cuda"] = torch.version.cuda
        self._origin = {
            "date": origin["date"],
            "commit": origin["commit"],
            "hardware": hardware,
            "versions": " ".join(f"{k}={v}" for k, v in versions.items()),
        }

    def has(self, case: CompressCase, retry_failed: bool) -> bool:
        rows = self.book.find(case_key(self._row(case, work="", status="")))
        if case.kind == FLOOR or not rows:
            return False
        return not retry_failed or all(row.status == OK for row in rows)

    def run(self, case: CompressCase) -> list[CompressRow]:
        """Measure a case and keep its rows; one that fails is a row too."""
        try:
            rows = self._measure(case)
        except Exception as error:
            note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            rows = [self._row(case, work="", status=FAILED, note=note)]
        self.book.replace(rows)
        gc.collect()
        if self.device.type == "cuda" and torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):  # check_device says what to do about it
                torch.cuda.empty_cache()
        return rows

    def check_device(self) -> None:
        """After some errors a CUDA context answers nothing but errors; the rows so far are safe."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise JobError(
                "the CUDA device no longer works in this process; start again to measure the rest "
                f"({str(error).splitlines()[0]})"
            ) from None

    def _infos(self, case: CompressCase) -> list[ParameterInfo]:
        infos = self.shapes[case.model]
        if case.tensor is None:
            return infos
        return [next(info for info in infos if _label(info) == case.tensor)]

    def _row(self, case: CompressCase, *, work: str, status: str, **values: Any) -> CompressRow:
        infos = keep_compressible(self._infos(case))
        ours = case.kind == THINWIRE
        return CompressRow(
            **vars(case),
            work=work,
            status=status,
            elements=sum(info.numel for info in infos),
            tensors=len(infos),
            world=self.settings.world if ours else None,
            bucket_mb=self.settings.bucket_mb if ours else None,
            device=self.device.type,
            **self._origin,
            **values,
        )

    def _measure(self, case: CompressCase) -> list[CompressRow]:
        if case.kind == FLOOR:
            return [self._measure_floor(case)]
        if case.kind == ANCHOR:
            return [self._measure_anchor(case)]
        return self._measure_method(case)

    def _time(self, case: CompressCase, lap: Callable[[Stopwatch], None]) -> dict[str, Timing]:
        seconds = self.settings.seconds
        if case.tensor is not None:
            seconds = min(seconds, TENSOR_SECONDS)
        return time_laps(lap, self.device, repeats=self.settings.repeats, seconds=seconds)

    def _measure_floor(self, case: CompressCase) -> CompressRow:
        """One pass over all that is compressible: residual = gradient + residual."""
        elements = sum(info.numel for info in keep_compressible(self._infos(case)))
        gradient, residual = (torch.ones(elements, device=self.device) for _ in range(2))

        def lap(watch: Stopwatch) -> None:
            with watch.span(COPY):
                torch.add(gradient, residual, out=residual)

        timing = self._time(case, lap)[COPY]
        self._floors[case.model] = timing.ms
        row = self._timed_row(case, COPY, timing, payload_bytes=None)
        return replace(row, gb_per_s=FLOOR_BYTES * elements / timing.ms / 1e6)

    def _measure_anchor(self, case: CompressCase) -> CompressRow:
        spec = ANCHORS[case.name]
        infos = keep_compressible(self._infos(case))
        anchor = spec.make(infos, case.density or 1.0, self.device)
        timings = self._time(case, anchor.lap)
        (timing,) = timings.values()
        return self._timed_row(case, spec.work, timing, payload_bytes=anchor.payload_bytes)

    def _measure_method(self, case: CompressCase) -> list[CompressRow]:
        method = build_method(case.name, keep_taken(case.name, density=case.density))
        if case.tensor is not None:
            # Its time is asked for, not whether it would pay.
            method = replace(method, dense_fallback=False)  # type: ignore[call-arg]
        fleet = Fleet(
            self._infos(case),
            method,
            world=self.settings.world,
            device=self.device,
            bucket_mb=self.settings.bucket_mb,
        )
        timings = self._time(case, fleet.lap)
        return [
            self._timed_row(
                case,
                work,
                timings[work],
                payload_bytes=fleet.payload_bytes if work == ENCODE else None,
                buckets=len(fleet.buckets[0]),
                settings=repr(method),
            )
            for work in (ENCODE, DECODE)
            if work in timings
        ]

    def _timed_row(
        self, case: CompressCase, work: str, timing: Timing, **values: Any
    ) -> CompressRow:
        floor = None if case.tensor is not None else self._floors.get(case.model)
        return self._row(
            case,
            work=work,
            status=OK,
            ms=timing.ms,
            ms_p20=timing.ms_p20,
            ms_p80=timing.ms_p80,
            host_ms=timing.host_ms,
            device_ms=timing.device_ms,
            peak_extra_bytes=timing.peak_bytes,
            laps=timing.laps,
            floor_ms=floor,
            ratio=timing.ms / floor if floor else None,
            **values,
        )


def summarise(rows: Sequence[CompressRow]) -> str:
    """One line about the rows of a case."""
    parts = []
    for row in rows:
        if row.status != OK or row.ms is None:
            return f"failed: {row.note}"
        ratio = "" if row.ratio is None or row.kind == FLOOR else f", {row.ratio:.2f}x the floor"
        speed = "" if row.gb_per_s is None else f", {row.gb_per_s:,.0f} GB/s"
        alone = row.device_ms is not None
        host = f", host {row.host_ms:.2f} ms, device {row.device_ms:.3g} ms" if alone else ""
        parts.append(
            f"{row.work} {row.ms:.3g} ms ({row.ms_p20:.3g} to {row.ms_p80:.3g}){ratio}{speed}{host}"
        )
    return "; ".join(parts)
