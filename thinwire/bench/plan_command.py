"""`thinwire plan`: what to compress, and whether at all, for any link and any number of workers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.auto import PROFILE_VARIABLE, Traffic, profile_steps
from thinwire.bench.models import MODELS, build_workload, find_model
from thinwire.bench.plan_plots import draw_map, draw_rates, draw_timeline
from thinwire.bench.plan_record import record_plan
from thinwire.errors import JobError, UsageError
from thinwire.lab.rates import parse_bits
from thinwire.plan import (
    TAKEN_FROM,
    Candidate,
    Decision,
    LinkPrices,
    Predictor,
    Profile,
    find_candidates,
    make_advice,
)
from thinwire.report.build import write_report
from thinwire.report.runs import PLAN_FILE
from thinwire.tools.files import write_text
from thinwire.tools.processes import loopback, start_process, stop_processes
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.kinds import Folder, NewFile, Positive, PositiveNumber
from thinwire.tools.settings.options import DryRun, command
from thinwire.tools.warden import Warden

CONTEXT_SETTINGS = {"allow_interspersed_args": True}
MOMENTUM = 0.9
MAP_RATES = (1, 2, 5, 10, 25, 40, 100, 200, 400)
MAP_WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LONGEST_RUN_S = 600.0
MOST_STEPS = 120
GRACE_S = 3.0

CPU_ONLY = "That is for training on this kind of CPU. On a GPU steps are shorter, and compressing pays on faster links: ask where you train."

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL | -- COMMAND",
        help="A model's name, module:function, a profile.json, or what trains with tw.Auto().",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What it is planned for."""

    rate: Annotated[str, "RATE"] = "10gbit"
    """Rate of each worker's link."""
    workers: Positive = 4
    """How many there are."""
    hop_us: PositiveNumber = 50.0
    """Latency of one hop, in microseconds."""
    measure: bool = False
    """Under torchrun: measure on the real cluster instead."""

    def __post_init__(self) -> None:
        check_fields(self)
        parse_bits(self.rate)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained."""

    optimizer: Literal["sgd", "adam", "unknown"] = "sgd"
    """Its kind decides what is safe."""
    quality: Literal["safe", "balanced", "fastest"] = "balanced"
    """What may be lost."""
    batch: Positive | None = None
    """Samples per worker; the model's own unless given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """What is written."""

    out: Folder | None = None
    """Write plan.json, report.html and pictures there."""
    save: NewFile | None = None
    """Keep the profile there, for other links and workers."""


@command
def plan(
    words: Words = None,
    *,
    cluster: Cluster,
    job: Job,
    output: PlanOutput,
    dry_run: DryRun = False,
) -> None:
    """Predict a step under every method, and say what to use, or not to compress.

    thinwire plan resnet50 --rate 10gbit --workers 16

    One worker is measured on this machine; the link and the other workers
    are predicted. On a real cluster: torchrun ... -m thinwire plan MODEL
    --measure. A training script that uses tw.Auto() runs until it has been
    measured: thinwire plan -- torchrun --nproc-per-node 2 train.py
    """
    if not words:
        raise UsageError(f"name a model, one of {', '.join(MODELS)}, a profile.json or a command")
    if dry_run:
        place = "the workers that were started" if cluster.measure else "one worker here"
        typer.echo(f"{' '.join(words)}: measured on {place}, planned for {cluster.workers} workers")
        return
    if cluster.measure:
        measure_here(words[0], job, output.save)
        return
    candidates = choose_candidates(job, cluster.workers)
    profile = find_profile(words, job, candidates)
    if output.save is not None:
        profile.save(output.save)
    traffic = Traffic(cluster.workers)
    predictor = predict(profile, candidates, parse_bits(cluster.rate), cluster, traffic)
    decision = predictor.decide()
    typer.echo(
        f"{profile.device}, {cluster.workers} workers, links of {cluster.rate} (predicted; "
        f"a step without communication takes {1e3 * profile.conditions.silent_s:.1f} ms)"
    )
    advice = make_advice(profile, decision)
    typer.echo(str(advice))
    by_rate = {
        gbit: predict(profile, candidates, gbit * 1e9, cluster, traffic).decide()
        for gbit in MAP_RATES
    }
    border = describe_border(by_rate)
    typer.echo(border)
    if profile.device == "CPU":
        typer.echo(CPU_ONLY)
    if output.out is None:
        return
    settings = {"planned": " ".join(words), **asdict(cluster), **asdict(job)}
    found = record_plan(settings, profile, decision, advice, border, by_rate)
    output.out.mkdir(parents=True, exist_ok=True)
    write_text(output.out / PLAN_FILE, json.dumps(found, indent=1) + "\n")
    if find_spec("matplotlib") is not None:
        for path in draw(output.out, profile, decision, by_rate, candidates, cluster):
            typer.echo(f"picture: {path}")
    typer.echo(f"page: {write_report(output.out)}")


def choose_candidates(job: Job, workers: int) -> list[Candidate]:
    """What a job with torch's own SGD or AdamW may use."""
    return find_candidates(
        job.quality, job.optimizer, workers, takes_over=TAKEN_FROM.get(job.optimizer)
    )


def predict(
    profile: Profile,
    candidates: Sequence[Candidate],
    bits_per_s: float,
    cluster: Cluster,
    traffic: Traffic,
) -> Predictor:
    prices = LinkPrices(bits_per_s, cluster.hop_us / 1e6, traffic.world)
    return Predictor(profile, candidates, prices, traffic.rounds, traffic.world)


def describe_border(by_rate: dict[int, Decision]) -> str:
    """Up to which rate compression pays."""
    paying = [gbit for gbit, one in by_rate.items() if set(one.chosen.labels) != {"dense"}]
    if not paying:
        return f"Do not compress on any link of {min(by_rate)} Gbit/s or more."
    if max(paying) == max(by_rate):
        return f"Compress on all links of up to {max(by_rate)} Gbit/s."
    free = min(gbit for gbit in by_rate if gbit > max(paying))
    return f"Compress up to {max(paying)} Gbit/s; from {free} Gbit/s on do not."


# -- profiles --------------------------------------------------------------------------------------------------


def find_profile(words: Sequence[str], job: Job, candidates: Sequence[Candidate]) -> Profile:
    if len(words) > 1:
        return run_until_measured(words)
    path = Path(words[0])
    if path.suffix == ".json":
        if not path.is_file():
            raise UsageError(f"profile is '{path}', but there is no such file")
        return Profile.load(path)
    find_model(words[0])
    slow = "; a large model takes minutes on a CPU" if not torch.cuda.is_available() else ""
    typer.echo(f"measuring one worker of {words[0]} here{slow}", err=True)
    with alone():
        handle, step = start_model(words[0], job, tw.Dense())
        profile = profile_steps(handle.reducer, step, candidates)
        handle.close()
    return profile


def run_until_measured(words: Sequence[str]) -> Profile:
    """Run somebody's training until rank 0 has written its profile."""
    with (
        tempfile.TemporaryDirectory(prefix="thinwire-plan-") as folder,
        Warden(Path(folder)) as warden,
    ):
        path = Path(folder, "profile.json")
        environment = {**os.environ, PROFILE_VARIABLE: str(path)}
        process = start_process(words, environment, sys.stderr.buffer)
        warden.guard(process)
        ended = time.monotonic() + LONGEST_RUN_S
        try:
            while not path.exists() and process.poll() is None and time.monotonic() < ended:
                time.sleep(0.2)
        finally:
            stop_processes([process], GRACE_S)
        if not path.exists():
            raise JobError(
                "the command ended or took too long before it was measured; it has to train with tw.Auto() on two "
                "workers or more, for about 40 steps"
            )
        return Profile.load(path)


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process only, which listens on the loopback."""
    os.environ |= loopback()
    with tempfile.TemporaryDirectory(prefix="thinwire-plan-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def start_model(name: str, job: Job, method: tw.Method) -> tuple[tw.Handle, Callable[[], None]]:
    """A model of the benchmark under DDP: its handle and one training step."""
    wanted = job.device if job.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if wanted == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    spec = find_model(name)
    model, loss = build_workload(
        name, device, job.batch or spec.batch, spec.length, dist.get_rank()
    )
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=MOMENTUM)
    if job.optimizer == "adam":
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-5)
    given = None if job.optimizer == "unknown" else optimizer
    handle = tw.attach(ddp, method, optimizer=given)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(ddp)
        value.backward()
        optimizer.step()

    return handle, step


def measure_here(name: str, job: Job, save: Path | None) -> None:
    """On the ranks that a launcher has started: let tw.Auto() settle, tell what it found, and keep the profile."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise UsageError(
            "measure is on, but no launcher has started this; use torchrun ... -m thinwire plan"
        )
    if save is not None:
        os.environ[PROFILE_VARIABLE] = str(save)
    cuda = job.device == "cuda" or (job.device == "auto" and torch.cuda.is_available())
    dist.init_process_group("nccl" if cuda else "gloo")
    handle, step = start_model(name, job, tw.Auto(quality=job.quality))
    for _ in range(MOST_STEPS):
        step()
        if handle.advise().settled:
            break
    if dist.get_rank() == 0:
        typer.echo(str(handle.advise()))
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads can abort while the interpreter shuts down.
    os._exit(0)


def draw(
    out: Path,
    profile: Profile,
    decision: Decision,
    by_rate: dict[int, Decision],
    candidates: Sequence[Candidate],
    cluster: Cluster,
) -> list[Path]:
    """Timeline, step time against rate, and the map of who wins."""
    paths = [out / "timeline.png", out / "rates.png", out / "who-wins.png"]
    draw_timeline(paths[0], decision)
    draw_rates(paths[1], by_rate, cluster.workers)
    won = {}
    for workers in MAP_WORKERS:
        traffic = Traffic(workers)
        for gbit in MAP_RATES:
            decided = predict(profile, candidates, gbit * 1e9, cluster, traffic).decide_alike()
            won[gbit, workers] = decided.name
    draw_map(paths[2], won)
    return paths
