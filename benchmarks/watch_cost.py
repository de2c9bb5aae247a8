"""What `watch=n` and `checksum=True` cost: milliseconds of a training step without them, and what they add.

    python3 benchmarks/watch_cost.py --workers 2
    python3 benchmarks/watch_cost.py --workers 1 --device cuda

An encoder (19 million parameters) is trained with `watch=4`. A comparison adds to two of four steps, one that notes its update and one that
looks at the parameters; the other two are plain, so that all are measured side by side. What both add, over 100 steps, is the price of
`watch=100`. Checksums have a training of their own. On CUDA every worker needs a GPU of its own.

Times are medians, by two clocks: the wall's, and, on a CPU, the seconds of a core that the worker itself used, which others on the machine
hardly change.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.tools.processes import loopback

EVERY = 100
CYCLE = 4
WARM_STEPS = CYCLE
NOTING, LOOKING, CHECKED = "noting the update", "looking at the parameters", "checksums"
PLAIN = "plain"
Times = dict[str, dict[str, list[float]]]
"""Milliseconds of single steps, by kind of step and clock."""


def kind_of(step: int) -> str:
    return {CYCLE - 1: NOTING, 0: LOOKING}.get(step % CYCLE, PLAIN)


def time_steps(rank: int, args: argparse.Namespace, times: Times, **options: Any) -> None:
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    handle = tw.attach(ddp, tw.ADTopK(density=0.01), **options)
    inputs = torch.randn(args.batch, 64, 512, device=device)
    for step in range(1, args.steps + WARM_STEPS + 1):
        wall, core = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        kind = kind_of(step) if "watch" in options else CHECKED
        assert handle.reducer.step == step
        if step > WARM_STEPS:
            times[kind]["on the wall"].append(1e3 * (time.perf_counter() - wall))
            times[kind]["of a core"].append(1e3 * (time.process_time() - core))
    handle.close()


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ |= loopback()
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=args.workers
    )
    times: Times = defaultdict(lambda: defaultdict(list))
    time_steps(rank, args, times, watch=CYCLE)
    time_steps(rank, args, times, checksum=True)
    if rank == 0:
        for clock in ("on the wall", "of a core") if args.device == "cpu" else ("on the wall",):
            report(clock, {kind: statistics.median(one[clock]) for kind, one in times.items()})
    dist.barrier()
    # Gloo's threads may abort while the interpreter ends.
    os._exit(0)


def report(clock: str, times: dict[str, float]) -> None:
    plain = times[PLAIN]
    compared = times[NOTING] + times[LOOKING] - 2 * plain
    checked = times[CHECKED] - plain
    share = 100 * compared / EVERY / plain
    print(
        f"{clock}: a step {plain:.1f} ms; a comparison {compared:.2f} ms, {share:.4f} % of a step at watch={EVERY}; "
        f"checksums {checked:.2f} ms in every step, {100 * checked / plain:.1f} %",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, str(Path(folder) / "store")), nprocs=args.workers)


if __name__ == "__main__":
    main()
