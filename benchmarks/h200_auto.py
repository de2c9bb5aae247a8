"""tw.Auto against the best fixed method, in the same processes: models x link rates, on one GPU.

    sudo python3 benchmarks/h200_auto.py --out out
    sudo python3 benchmarks/h200_auto.py --out out          # again: only what is missing
    sudo python3 benchmarks/h200_auto.py --out out --device cpu --models small --rates 200mbit --workers 2

Four hosts of an emulated cluster, one process each. Every row: let Auto measure, try and settle, time its steps; then switch
the same handle to each candidate by name and time that too, as far as its predicted step allows; then steps without
communication. A row has what was chosen, the regret against the best fixed method, and predicted against measured times.
Rows are saved one by one, and what does not fit into `--minutes` is left for the next run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "carry" / "python")]
sys.path[:0] = PATHS

MARGIN_S = 12.0
MOST_STEPS = 90
"""Auto has to have settled by then."""
SLOWEST_S = 1.5
"""A fixed method whose step is predicted to take longer is not measured: it cannot be the best one."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--minutes", type=float, default=9.3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default="bert-large,resnet152,vgg16,vit-large,gpt2")
    parser.add_argument("--rates", default="10gbit,1gbit,25gbit")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--quality", choices=("safe", "balanced", "fastest"), default="balanced")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--worker", help="used by itself: the settings of one row as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *([inherited] if inherited else [])])
    if options.worker:
        work(json.loads(options.worker))
        return
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=False)

    from thinwire.bench.step_cell import plan_cell
    from thinwire.bench.step_places import LabPlace
    from thinwire.lab.mps import CONTROL
    from thinwire.tools.provenance import describe_origin

    rows_file = options.out / "rows.json"
    options.out.mkdir(parents=True, exist_ok=True)
    rows = json.loads(rows_file.read_text()) if rows_file.exists() else []
    mps = options.device == "cuda" and not options.no_mps and shutil.which(CONTROL) is not None
    deadline = began + 60 * options.minutes - MARGIN_S
    with LabPlace(mps=mps) as place:
        for rate in options.rates.split(","):
            for model in options.models.split(","):
                key = {
                    "model": model,
                    "rate": rate,
                    "workers": options.workers,
                    "optimizer": options.optimizer,
                    "quality": options.quality,
                }
                if any(key.items() <= row.items() for row in rows):
                    continue
                left = deadline - time.monotonic()
                if left < 20:
                    print(f"{model} at {rate}: left for the next run")
                    continue
                cell = plan_cell(
                    model, "dense", rate=rate, workers=options.workers, device=options.device
                )
                with tempfile.TemporaryDirectory() as folder:
                    result = Path(folder, "row.json")
                    settings = {
                        **key,
                        "device": options.device,
                        "batch": cell.batch,
                        "length": cell.length,
                        "steps": options.steps,
                        "result": str(result),
                    }
                    command = [sys.executable, __file__, "--worker", json.dumps(settings)]
                    attempt = place.run(cell, command, min(left, 150.0))
                    if not result.exists():
                        print(f"{model} at {rate}: {attempt.reason} {attempt.output[-600:]}")
                        continue
                    row = json.loads(result.read_text())
                rows.append({**key, **row, **describe_origin()})
                rows_file.write_text(json.dumps(rows, indent=1))
                print(
                    f"{time.monotonic() - began:6.1f} s  {model} at {rate}: auto {row['auto_ms']:.1f} ms with "
                    f"{row['chosen']}, best fixed {row['best']} {row['best_ms']:.1f} ms, regret {row['regret']:+.1%}",
                    flush=True,
                )


def work(settings: dict[str, Any]) -> None:
    """One rank of one row."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw
    from thinwire.auto import Prospect
    from thinwire.bench.models import build_workload
    from thinwire.methods.base import Adaptive
    from thinwire.observe import Mark, wait_for

    device = torch.device("cpu")
    if settings["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, loss = build_workload(
        settings["model"], device, settings["batch"], settings["length"], dist.get_rank()
    )
    ddp = DistributedDataParallel(
        model, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    parameters = list(ddp.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    if settings["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    quality = settings["quality"]
    handle = tw.attach(ddp, tw.Auto(quality=quality), optimizer=optimizer)

    def step(synchronise: bool = True) -> None:
        optimizer.zero_grad(set_to_none=True)
        narrow = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        with nullcontext() if synchronise else ddp.no_sync():
            with narrow:
                value = loss(ddp)
            value.backward()
        optimizer.step()

    def time_steps(count: int, synchronise: bool = True) -> float:
        """Median milliseconds, of the slowest rank."""
        dist.barrier()
        wait_for(device)
        marks = [Mark(device)]
        for _ in range(count):
            step(synchronise)
            marks.append(Mark(device))
        own = statistics.median(b.ms_since(a) for a, b in itertools.pairwise(marks))
        slowest = torch.tensor([own], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    began, taken = time.monotonic(), 0
    while not handle.advise().settled and taken < MOST_STEPS:
        step()
        taken += 1
    settling_s = time.monotonic() - began
    step()
    auto_ms = time_steps(settings["steps"])
    advice = handle.advise()
    fixed: dict[str, float] = {}
    predicted = {row.name: row.step_ms for row in advice.rows}
    prospect = Prospect(optimizer, dict(model.named_parameters()))
    adaptive = Adaptive(quality=quality)
    for candidate in prospect.candidates(adaptive, dist.get_world_size()):
        if predicted.get(candidate.label, 0.0) > 1e3 * SLOWEST_S and candidate.label != "dense":
            continue
        if predicted.get("dense", 0.0) > 1e3 * SLOWEST_S and candidate.label == "dense":
            continue
        handle.switch(candidate.method)
        for _ in range(3):
            step()
        fixed[candidate.label] = time_steps(max(4, settings["steps"] // 2))
    # Once more at the end: whatever drifted meanwhile shows.
    silent_ms = time_steps(6, synchronise=False)
    if dist.get_rank() == 0:
        best = min(fixed, key=lambda label: fixed[label]) if fixed else "none"
        best_ms = fixed.get(best, auto_ms)
        chosen = advice.chosen
        row = {
            "auto_ms": auto_ms,
            "chosen": chosen.name if chosen is not None else "dense",
            "kept": chosen.kept if chosen is not None else 1.0,
            "settling_steps": taken,
            "settling_s": settling_s,
            "no_sync_ms": silent_ms,
            "fixed_ms": fixed,
            "predicted_ms": predicted,
            "tried_ms": {row.name: row.measured_ms for row in advice.rows},
            "best": best,
            "best_ms": best_ms,
            "regret": auto_ms / best_ms - 1,
            "in_time": auto_ms <= max(1.10 * silent_ms, 1.02 * best_ms),
            "advice": str(advice),
        }
        Path(settings["result"]).write_text(json.dumps(row))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
