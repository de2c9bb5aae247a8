"""Which steps take much longer than the others, and what happened in them.

    python3 benchmarks/step_outliers.py adtopk dgc quantized topk --steps 40
    python3 benchmarks/step_outliers.py adtopk --merge-mb 0              # every bucket by itself
    python3 benchmarks/step_outliers.py adtopk --no-gc                   # without Python's collector of cycles
    python3 benchmarks/step_outliers.py adtopk --expandable-segments     # the allocator maps memory in small pieces
    python3 benchmarks/step_outliers.py adtopk --device cpu --model small --workers 2 --steps 8

All workers are on one GPU. Steps are timed from the very first one, without a warm-up. Of every step that takes more than twice
the median of the later half it prints what else changed on that rank: plans and ways that were made, garbage collections, and
calls of the allocator that make the device wait. A step in which nothing of that happened waited for another rank, or for the
link.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "carry" / "python")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from thinwire.bench.anchors import build_step_method, install  # noqa: E402
from thinwire.bench.models import build_workload, find_model  # noqa: E402
from thinwire.handle import Handle  # noqa: E402
from thinwire.tools.clock import Mark, wait_for  # noqa: E402

ALLOCATOR = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_sync_all_streams")
"""Of these, retries and frees make the host wait for the whole device, and every other process on it."""
SLOW = 2.0


class Collector:
    """Counts garbage collections and their time."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._began = 0.0
        gc.callbacks.append(self._note)

    def close(self) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        self.counts[f"gc generation {info['generation']}"] += 1
        self.counts["gc ms"] += round(1e3 * (time.perf_counter() - self._began))


class Record:
    """Everything that is counted, step by step."""

    def __init__(self, handle: Handle | None, device: torch.device) -> None:
        self._handle = handle
        self._device = device
        self._collector = Collector()
        self._plans: set[Any] = set()
        self._ways: set[Any] = set()
        self._before = self._totals()

    def close(self) -> None:
        self._collector.close()

    def changes(self) -> dict[str, int]:
        """What has changed since the last call. Nothing here waits for the device."""
        now, before = self._totals(), self._before
        self._before = now
        found = {name: count - before[name] for name, count in now.items() if count > before[name]}
        if self._handle is not None:
            plans = set(self._handle.reducer.plans.values())
            ways = {way for plan in plans for way in plan.ways.values()}
            made = {"plans made": len(plans - self._plans), "ways made": len(ways - self._ways)}
            self._plans, self._ways = plans, ways
            found |= {name: count for name, count in made.items() if count}
        return found

    def _totals(self) -> Counter[str]:
        totals = Counter(self._collector.counts)
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            totals.update({name: int(stats.get(name, 0)) for name in ALLOCATOR})
        return totals


def work(rank: int, options: argparse.Namespace, store: str) -> None:
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        if options.expandable_segments:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" and not options.gloo else "gloo"
    # NCCL refuses two ranks on one GPU unless they look like different hosts.
    os.environ["NCCL_HOSTID"] = str(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=options.workers
    )
    spec = find_model(options.model)
    batch = options.batch or spec.batch
    model, loss = build_workload(options.model, device, batch, spec.length, rank)
    for name in options.methods:
        show(name, options, measure(name, options, model, loss, device))
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads can abort while the interpreter shuts down.
    os._exit(0)


def measure(
    name: str, options: argparse.Namespace, model: Any, loss: Any, device: torch.device
) -> list[tuple[float, dict[str, int]]]:
    """(milliseconds, what happened) of every step on this rank."""
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    handle = install(ddp, build_step_method(name, options.density, None), optimizer)
    if handle is not None and options.merge_mb is not None:
        handle.reducer.merge_bytes = int(options.merge_mb * 2**20)
    gc.collect()
    (gc.disable if options.no_gc else gc.enable)()
    record = Record(handle, device)
    dist.barrier()
    wait_for(device)
    marks, happened = [Mark(device)], []
    for _ in range(options.steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(ddp)
        value.backward()
        optimizer.step()
        marks.append(Mark(device))
        happened.append(record.changes())
    wait_for(device)
    gc.enable()
    record.close()
    times = [after.ms_since(before) for before, after in itertools.pairwise(marks)]
    if handle is not None:
        handle.close()
    return list(zip(times, happened, strict=True))


def show(name: str, options: argparse.Namespace, steps: list[tuple[float, dict[str, int]]]) -> None:
    gathered: list[Any] = [None] * options.workers
    dist.all_gather_object(gathered, steps)
    if dist.get_rank() != 0:
        return
    later = [ms for rows in gathered for ms, _ in rows[len(rows) // 2 :]]
    usual = statistics.median(later)
    first = ", ".join(
        f"{max(rows[i][0] for rows in gathered):.0f}" for i in range(min(5, len(steps)))
    )
    print(f"{name}: median {usual:.1f} ms; the first steps took {first} ms")
    for step in range(len(steps)):
        for rank, rows in enumerate(gathered):
            ms, happened = rows[step]
            if ms > SLOW * usual:
                what = ", ".join(f"{key} {count}" for key, count in happened.items()) or "nothing"
                print(f"    step {step + 1}, rank {rank}: {ms:.0f} ms; {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="+", help="as in `thinwire bench step`")
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--density", type=float)
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument(
        "--merge-mb", type=float, help="0 for every bucket by itself; else the driver's"
    )
    parser.add_argument("--no-gc", action="store_true")
    parser.add_argument("--expandable-segments", action="store_true")
    parser.add_argument(
        "--gloo", action="store_true", help="where NCCL does not take several ranks on a GPU"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options, str(Path(folder) / "store")), nprocs=options.workers)


if __name__ == "__main__":
    main()
