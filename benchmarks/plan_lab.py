"""How well the planner predicts steps on gloo: models x links x workers in the lab, each from a few dense steps.

    sudo python3 benchmarks/plan_lab.py                 # what is missing in benchmarks/results/plan_lab/rows.json
    sudo python3 benchmarks/plan_lab.py --minutes 5     # for so long; the same command again goes on
    python3 benchmarks/plan_lab.py --table              # the rows as Markdown

One host per worker, links shaped by the kernel. Every cell, in the same processes: attach dense, `handle.measure()`, then
switch to each candidate in turn and time its steps, with steps without communication between them. The candidates' own steps
are not used for the prediction. A step takes as long as on its slowest rank. Of several the fastest counts, with and without
communication, because others may use the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROWS = ROOT / "benchmarks/results/plan_lab/rows.json"
CELLS = [
    *itertools.product(("small", "wide"), ("30mbit", "150mbit"), (2, 4)),
    ("tiny", "unshaped", 2),
    ("small", "unshaped", 1),
    ("deep", "unshaped", 2),
]
"""The last three are where nothing should be compressed."""
TIMED = ("dense", "int8", "adtopk-residual-1%", "topk-residual-5%")
ROUNDS, WARM, STEPS, SILENT = 2, 2, 3, 2
LONGEST_S = 240.0
"""Of one cell."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--table", action="store_true", help="print the rows and stop")
    parser.add_argument("--worker", help="used by itself: the settings of one cell as JSON")
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
    elif options.table:
        print_table(json.loads(options.rows.read_text()))
    else:
        measure(options.rows, time.monotonic() + 60 * options.minutes)


def measure(path: Path, deadline: float) -> None:
    from thinwire.lab import Lab, LabSpec
    from thinwire.tools.provenance import describe_origin

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    for model, rate, workers in CELLS:
        key = {"model": model, "rate": rate, "workers": workers}
        if any(key.items() <= row.items() for row in rows):
            continue
        if time.monotonic() > deadline:
            print(f"{key}: left for the next run")
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            Lab(LabSpec(hosts=workers, rate=rate)) as lab,
        ):
            result = Path(folder, "row.json")
            settings = {**key, "result": str(result)}
            command = [sys.executable, __file__, "--worker", json.dumps(settings)]
            load = os.getloadavg()[0]
            ended = lab.run(command, timeout_s=LONGEST_S, as_root=True)
            if not result.exists():
                print(f"{key}: {ended.reason} {ended.ranks[0].output[-1500:]}", flush=True)
                continue
            row = {**key, "load": round(load, 1), **json.loads(result.read_text())}
        rows.append({**row, **describe_origin()})
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{key}: {row['advised']}", flush=True)


def build(name: str) -> tuple[Any, int]:
    """(model, features that it takes)."""
    from torch import nn

    sizes = {
        "tiny": (16, 16, 4),
        "small": (512, 1024, 512, 10),
        "wide": (512, 1024, 1024, 512, 10),
        # Much to compute for what is sent.
        "deep": (192,) * 7,
    }[name]
    layers: list[Any] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), sizes[0]


def advise(advice: Any) -> str:
    """What a dense job is told to use."""
    changes = any("change to it" in sentence for sentence in advice.sentences)
    return advice.chosen.name if changes else "dense"


def work(settings: dict[str, Any]) -> None:
    """One rank of one cell."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw
    from thinwire.plan import find_candidates

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, features = build(settings["model"])
    ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    handle = tw.attach(ddp, tw.Dense())
    batch = torch.randn(1024 if settings["model"] == "deep" else 32, features)

    def step(synchronise: bool = True) -> None:
        optimizer.zero_grad()
        with nullcontext() if synchronise else ddp.no_sync():
            ddp(batch).square().mean().backward()
        optimizer.step()

    def time_steps(count: int, synchronise: bool = True) -> list[float]:
        """Milliseconds of every step, on the rank that it took longest on."""
        dist.barrier()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            step(synchronise)
            times.append(1e3 * (time.perf_counter() - began))
        slowest = torch.tensor(times)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    handle.measure(4, quality="fastest")
    while not handle.advise().settled:
        step()
    advice = handle.advise()
    known = find_candidates("fastest", "unknown", dist.get_world_size())
    methods = {one.label: one.method for one in known if one.label in TIMED}
    taken: dict[str, list[float]] = {label: [] for label in methods}
    silent: list[float] = []
    for _ in range(ROUNDS if dist.get_world_size() > 1 else 0):
        for label, method in methods.items():
            handle.switch(method)
            for _ in range(WARM):
                step()
            taken[label] += time_steps(STEPS)
            silent += time_steps(SILENT, synchronise=False)
    if dist.get_rank() == 0:
        row = {
            "steps_ms": taken,
            "silent_ms": silent,
            "exposed_ms": {k: min(took) - min(silent) for k, took in taken.items() if took},
            "predicted_ms": {r.name: r.exposed_ms for r in advice.rows},
            "advised": advise(advice),
            "advice": str(advice),
        }
        Path(settings["result"]).write_text(json.dumps(row))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| model | link | workers | candidate | exposed ms | predicted | within max(3 ms, 20 %) |"
    )
    print("|---|---|---|---|---|---|---|")
    errors, regrets = [], []
    for row in (row for row in rows if row["rate"] != "unshaped"):
        place = f"{row['model']} | {row['rate']} | {row['workers']}"
        for label, exposed in row["exposed_ms"].items():
            predicted = row["predicted_ms"][label]
            errors.append(abs(predicted - exposed) / max(3.0, 0.2 * exposed))
            fine = "yes" if errors[-1] <= 1 else "no"
            print(f"| {place} | {label} | {exposed:.0f} | {predicted:.0f} | {fine} |")
        steps = {label: min(took) for label, took in row["steps_ms"].items()}
        choice = min(steps, key=lambda label: row["predicted_ms"][label])
        regrets.append((steps[choice] / min(steps.values()) - 1, place, choice))
    print()
    within = sum(error <= 1 for error in errors)
    print(
        f"Median error {median(errors):.2f} of what is allowed; {within} of {len(errors)} rows are within it."
    )
    for regret, place, choice in regrets:
        print(f"{place}: the fastest by prediction is {choice}, regret {regret:.1%}")
    for row in (row for row in rows if row["rate"] == "unshaped"):
        dense = row["exposed_ms"].get("dense")
        took = (
            "" if dense is None else f"; dense is {dense:.1f} ms over {min(row['silent_ms']):.1f}"
        )
        print(f"{row['model']}, no shaping, {row['workers']} workers: {row['advised']}{took}")
    loads = [row["load"] for row in rows]
    print(f"Load of the machine (2 cores) meanwhile: {min(loads)} to {max(loads)}.")


if __name__ == "__main__":
    main()
