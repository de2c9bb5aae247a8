"""What low-rank compression costs on a GPU, against the arithmetic of torch's PowerSGD hook, in a minute and a half.

    python3 benchmarks/h200_lowrank.py --out out
    python3 benchmarks/h200_lowrank.py --out out --device cpu --models small       # to see that all works

First the GPU tests of tests/lowrank, then times: PowerSGD, ACP-SGD and the hook on the matrices of a model, in DDP's buckets, and
both methods on the whole model. No network: two workers in one process, of which one is timed from its gradients to its
update, the next step's settling included; the hook's arithmetic as `thinwire bench compress` has it, without its sums. "plain" is
PowerSGD by torch's operations instead of thinwire's kernels.

Needs torch; pytest for the tests; neither typer nor rich, transformers or torchvision.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "carry" / "python")]
sys.path[:0] = PATHS

if TYPE_CHECKING:
    from thinwire.layout import ParameterInfo

WORLD = 2
TEST_S = 40.0
RANKS = (4, 32)
GOAL = 0.5
"""Of the hook's time: what PowerSGD at rank 4 may take on BERT-large."""
MATRICES = "matrices"
MODEL = "whole model"
HOOK = "torch hook"
PLAIN = "plain"
"""PowerSGD without its kernels: what torch's own operations take."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to compress one model; times are those of one step."""

    model: str
    rank: int
    name: str
    parameters: str
    """Which: the matrices that are compressed, or the whole model."""
    elements: int
    buckets: int | None
    ms: float
    """Until the device has done everything; median."""
    host_ms: float
    """Until the host has issued everything."""
    kernel_ms: float | None
    """Of all kernels together, from one profiled step."""
    launches: int | None
    ratio: float | None
    """ms / the hook's, of the same matrices."""
    laps: int


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default="bert-large,resnet50")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--seconds", type=float, default=0.6, help="per row")
    parser.add_argument("--limit", type=float, default=85.0, help="seconds in all")
    parser.add_argument("--no-tests", action="store_true")
    return parser.parse_args()


def run_tests(out: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-o", "addopts=", "tests/lowrank/test_gpu.py"]
    log = out / "pytest.txt"
    with log.open("w") as output:
        try:
            subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=TEST_S
            )
        except subprocess.TimeoutExpired:
            return "time was up"
    lines = log.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n    ".join([*(lines[-1:] or ["nothing was said"]), *failed])


def describe(model: str) -> list[ParameterInfo]:
    """Parameters of a model by their shapes alone."""
    import torch

    from thinwire.bench.lowrank import bert_shapes, shapes_of
    from thinwire.layout import ParameterInfo, contiguous_strides, kind_from_shape

    shapes = bert_shapes(1, 192, 512) if model == "small" else shapes_of(model)
    return [
        ParameterInfo(
            f"{number}",
            shape,
            contiguous_strides(shape),
            torch.float32,
            kind_from_shape(len(shape)),
        )
        for number, shape in enumerate(shapes)
    ]


def compressed(infos: Sequence[ParameterInfo], rank: int) -> list[ParameterInfo]:
    """What PowerSGD and the hook compress alike; the rest stays dense."""
    from thinwire.methods.powersgd import PowerSGD

    method = PowerSGD(rank=rank)
    return [i for i in infos if method.reason_against(i.slot(0), 32, WORLD) is None]


class Profiler:
    """Stands in for a stopwatch: kernel time and launches of what it is asked to watch."""

    def __init__(self) -> None:
        self.kernel_ms = 0.0
        self.launches = 0

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        import torch
        from torch.autograd import DeviceType

        torch.cuda.synchronize()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            yield
            torch.cuda.synchronize()
        found = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
        self.kernel_ms += sum(event.time_range.elapsed_us() for event in found) / 1e3
        self.launches += len(found)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """As where no kernels can be compiled."""
    from thinwire.kernels.cuda.toolchain import use_toolchain

    with use_toolchain("cuda", None):
        yield


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from thinwire.bench.measure import choose_device

        device, self.hardware = choose_device(options.device)
        # With its number, as the buckets of a real model have it.
        self.device = torch.empty(0, device=device).device
        self.seconds = options.seconds
        self.rows: list[Row] = []

    def fleet(self, infos: Sequence[ParameterInfo], name: str, rank: int) -> tuple[Any, int]:
        from thinwire.bench.compress_fleet import Fleet
        from thinwire.methods.acpsgd import ACPSGD
        from thinwire.methods.powersgd import PowerSGD

        method = (ACPSGD if name == "acpsgd" else PowerSGD)(rank=rank)
        fleet = Fleet(infos, method, world=WORLD, device=self.device, bucket_mb=None)
        return fleet.lap, len(fleet.buckets[0])

    def hook(self, infos: Sequence[ParameterInfo], rank: int) -> Callable[..., None]:
        import torch

        from thinwire.bench.compress_anchors import TorchPowerSGD

        anchor = TorchPowerSGD(infos, 1.0, self.device)
        # The anchor has torch's usual rank.
        anchor._p, anchor._q = [], []
        for matrix in anchor._matrices:
            _, rows, columns = matrix.shape
            anchor._p.append(torch.empty(1, rows, min(rank, rows, columns), device=self.device))
            anchor._q.append(torch.randn(1, columns, min(rank, rows, columns), device=self.device))
        return anchor.lap

    def add(
        self, model: str, rank: int, name: str, parameters: str, infos: Sequence[ParameterInfo]
    ) -> Row:
        import torch

        from thinwire.bench.compress_timing import time_laps

        if name == HOOK:
            lap, buckets = self.hook(infos, rank), None
        else:
            lap, buckets = self.fleet(infos, name, rank)
        profiler = Profiler()
        with without_kernels() if name == PLAIN else contextlib.nullcontext():
            timings = time_laps(lap, self.device, repeats=20, seconds=self.seconds).values()
            if self.device.type == "cuda":
                lap(profiler)
        theirs = next(
            (r for r in self.rows if (r.model, r.rank, r.name) == (model, rank, HOOK)), None
        )
        ms = sum(timing.ms for timing in timings)
        row = Row(
            model=model,
            rank=rank,
            name=name,
            parameters=parameters,
            elements=sum(info.numel for info in infos),
            buckets=buckets,
            ms=ms,
            host_ms=sum(timing.host_ms for timing in timings),
            kernel_ms=profiler.kernel_ms if profiler.launches else None,
            launches=profiler.launches or None,
            ratio=ms / theirs.ms if theirs and parameters == MATRICES else None,
            laps=max(timing.laps for timing in timings),
        )
        self.rows.append(row)
        del lap
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def save(self, out: Path) -> None:
        import torch

        from thinwire.tools.provenance import describe_origin

        origin = describe_origin()
        where = {
            "date": origin["date"],
            "commit": origin["commit"],
            "hardware": self.hardware,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "world": WORLD,
        }
        lines = ",\n".join(json.dumps({**asdict(row), **where}) for row in self.rows)
        (out / "rows.json").write_text(f"[\n{lines}\n]\n")


def plan(models: Sequence[str], ranks: Sequence[int]) -> Iterator[tuple[str, int, str, str]]:
    """What the goal is about first."""
    for rank in ranks:
        for model in models:
            for name in (HOOK, "powersgd", "acpsgd"):
                yield model, rank, name, MATRICES
    for model in models:
        for name in ("powersgd", "acpsgd"):
            yield model, ranks[0], name, MODEL
    for rank in ranks:
        yield models[0], rank, PLAIN, MATRICES


def format_row(row: Row) -> str:
    def number(value: float | None, text: str) -> str:
        return "-" if value is None else format(value, text)

    return (
        f"{row.model:11} rank {row.rank:2} {row.name:10} {row.parameters:11} "
        f"{row.elements / 1e6:6.1f}M  {number(row.buckets, 'd'):>3} buckets  wall {row.ms:8.3f} ms  "
        f"host {row.host_ms:8.3f}  kernels {number(row.kernel_ms, '.3f'):>8}  "
        f"launches {number(row.launches, 'd'):>5}  of the hook {number(row.ratio, '.2f')}"
    )


def main() -> None:
    began = time.monotonic()
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *([inherited] if inherited else [])])

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    if not options.no_tests:
        say(f"tests: {run_tests(options.out)}")
    bench = Bench(options)
    models, ranks = options.models.split(","), [int(rank) for rank in options.ranks.split(",")]
    for model, rank, name, parameters in plan(models, ranks):
        if time.monotonic() - began > options.limit:
            say("time is up; the rest is left out")
            break
        infos = describe(model)
        chosen = infos if parameters == MODEL else compressed(infos, rank)
        try:
            say(format_row(bench.add(model, rank, name, parameters, chosen)))
        except Exception as error:
            say(f"{model} rank {rank} {name} {parameters} failed: {type(error).__name__}: {error}")
            continue
        bench.save(options.out)
    for row in bench.rows:
        if (row.model, row.rank, row.name) == ("bert-large", 4, "powersgd") and row.ratio:
            verdict = "reached" if row.ratio <= GOAL else "missed"
            say(f"goal {verdict}: {row.ratio:.3f} of the hook's time, at most {GOAL} is asked for")


if __name__ == "__main__":
    main()
