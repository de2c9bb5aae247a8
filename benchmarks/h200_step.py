"""The step table of benchmarks/results: 4 hosts on one GPU at 10 and 1 Gbit/s, for one sitting of ten minutes.

    sudo python3 benchmarks/h200_step.py --out out
    sudo python3 benchmarks/h200_step.py --out out                       # again: only what is missing
    sudo python3 benchmarks/h200_step.py --out out --device cpu --models small --rates 500mbit,200mbit --workers 2
    sudo python3 benchmarks/h200_step.py --out out --cells adtopk:bert-large:10gbit --workers 1,2,4 --profile

Needs torch and pyroute2 (a copy under ./carry/python will do), for the real models transformers and torchvision; neither
typer nor rich. The most important cells come first, every row is saved as soon as it is measured, and cells that no
longer fit into `--minutes` are left for the next run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "carry" / "python")]
sys.path[:0] = PATHS

FAST_TIMEOUT_S = 90.0
SLOW_TIMEOUT_S = 200.0
MARGIN_S = 12.0
"""Left at the end for stopping processes and taking the lab down."""

PREFERRED = ("acpsgd", "powersgd", "oktopk", "exclusive", "dgc")
"""Which of the other methods come first."""

ANCHORS = {
    "ddp": ("noop", ("ddp", "ddp-powersgd", "ddp-bf16")),
    "hsdp": ("no_sync", ("hsdp",)),
}
"""What sends nothing, and what torch itself offers."""

WARM_DISK = """
import importlib, torch, torch._dynamo, torch.distributed
for name in ("transformers.models.bert.modeling_bert", "torchvision.models"):
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name} cannot be imported: {error}")
print("torch", torch.__version__)
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--resume", type=Path, help="rows.json of an earlier sitting")
    parser.add_argument("--minutes", type=float, default=9.3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default="bert-large,resnet152,vgg16")
    parser.add_argument("--methods", help="thinwire's methods; default all, adtopk and topk first")
    parser.add_argument(
        "--cells",
        help="these and no others: METHOD:MODEL:RATE[:DENSITY[:BUCKET_MB]], with commas; a method of your own is MODULE@ATTRIBUTE",
    )
    parser.add_argument("--parallel", choices=("ddp", "hsdp"), default="ddp")
    parser.add_argument("--rates", default="10gbit,1gbit", help="the fast one first")
    parser.add_argument("--workers", default="4", help="one number or several, with commas")
    parser.add_argument("--profile", action="store_true", help="where the host spends a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--density", type=float)
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--commit", help="for the rows, where this is no checkout")
    return parser.parse_args()


def plan(options: argparse.Namespace) -> list:
    """Cells by importance: baselines, the fast link, the slow link, then what takes minutes on the slow link."""
    from thinwire.bench.step_cell import unique
    from thinwire.tools.methods import METHODS

    counts = [int(count) for count in options.workers.split(",")]

    def spread(cells: Iterable) -> list:
        """Every cell with every number of workers, the first number before the others."""
        found = list(cells)
        return unique(replace(cell, workers=count) for count in counts for cell in found)

    if options.cells:
        return spread(parse_cell(text, options) for text in options.cells.split(","))
    named = [name for name in (options.methods or "").split(",") if name]
    first = [name for name in ("adtopk", "topk") if name in METHODS]
    ours = named or first
    listed = [*(name for name in PREFERRED if name in METHODS), *METHODS]
    extra = (
        [] if named else [name for name in dict.fromkeys(listed) if name not in ("dense", *first)]
    )
    models = options.models.split(",")
    fast, *slower = options.rates.split(",")
    silent, anchors = ANCHORS[options.parallel]
    order = [(method, model, fast) for method in (silent, *ours[:1]) for model in models]
    order += [(method, model, fast) for method in (*anchors, *ours[1:]) for model in models]
    order += [(method, model, rate) for rate in slower for method in ours for model in models]
    order += [(method, model, fast) for method in extra for model in models]
    heavy = anchors[::-1]
    order += [(method, model, rate) for rate in slower for method in heavy for model in models[1:]]
    order += [("no_sync", model, fast) for model in models]
    order += [("dense", model, fast) for model in models if not named]
    order += [(method, model, rate) for rate in slower for method in extra for model in models]
    order += [(method, models[0], rate) for rate in slower for method in heavy]
    return spread(
        make_cell(options, method, model, rate, options.density) for method, model, rate in order
    )


def parse_cell(text: str, options: argparse.Namespace):
    """METHOD:MODEL:RATE[:DENSITY[:BUCKET_MB]]."""
    method, model, rate, *rest = text.split(":")
    method = method.replace("@", ":")
    density = float(rest[0]) if rest and rest[0] else None
    return make_cell(options, method, model, rate, density, float(rest[1]) if rest[1:] else None)


def make_cell(
    options: argparse.Namespace,
    method: str,
    model: str,
    rate: str,
    density: float | None,
    bucket_mb: float | None = None,
):
    from thinwire.bench.step_cell import plan_cell

    return plan_cell(
        model,
        method,
        rate=rate,
        device=options.device,
        amp="bf16" if options.device == "cuda" else "none",
        steps=options.steps,
        seconds=options.seconds,
        density=density,
        bucket_mb=bucket_mb,
        parallel=options.parallel,
    )


def main() -> None:
    began = time.monotonic()
    options = parse()
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *([inherited] if inherited else [])])
    # The first import from a cold disk must not count against the first cell.
    subprocess.run([sys.executable, "-c", WARM_DISK], check=False)

    from thinwire.bench.rows import RowBook, read_rows
    from thinwire.bench.step import run_cells
    from thinwire.bench.step_places import LabPlace
    from thinwire.lab.mps import CONTROL

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    book = RowBook(options.out)
    if options.resume is not None:
        for row in read_rows(options.resume):
            book.add(row)
    mps = options.device == "cuda" and not options.no_mps and shutil.which(CONTROL) is not None
    say(f"{len(book.rows)} rows are here already; MPS {'on' if mps else 'off'}")
    deadline = began + 60 * options.minutes - MARGIN_S
    profiles = options.out / "profiles" if options.profile else None
    fast = options.rates.split(",")[0]
    try:
        with LabPlace(mps=mps) as place:
            # Cells of one setup that follow each other share their processes.
            for _, cells in itertools.groupby(plan(options), key=lambda cell: cell.setup):
                run = list(cells)
                run_cells(
                    run,
                    book,
                    place,
                    timeout_s=FAST_TIMEOUT_S if run[0].rate in (fast, "any") else SLOW_TIMEOUT_S,
                    deadline=deadline,
                    profiles=profiles,
                    say=say,
                )
    finally:
        for row in book.rows:
            row["commit"] = row["commit"] or options.commit
        book.save()
        say(f"{len(book.rows)} rows in {options.out}")
        for path in sorted(profiles.glob("*-host.json")) if profiles is not None else ():
            print_profile(path)


def print_profile(path: Path) -> None:
    """Processor time of every phase for each of DDP's buckets, and the wall time of a step."""
    from thinwire.bench.host_profile import read_profile

    profile = read_profile(path)
    print(f"{profile.cell}: {profile.step_us:.0f} us a step, {profile.buckets:g} buckets")
    for phase in profile.phases:
        busy, wall = phase.busy_us / max(1.0, profile.buckets), phase.wall_us
        times = f"{phase.calls:g} times, {busy:.0f} us/bucket busy, {wall:.0f} us/step"
        print(f"    {phase.name:10} {phase.thread:10} {times}")


if __name__ == "__main__":
    main()
