"""One rank of one cell of the step benchmark: `python -m thinwire.bench.step_worker CELL RESULT PLACE [TRACE]`.

CELL is JSON. RESULT is written as JSON, by rank 0, as far as the run got; PLACE is "lab", "local" or "cluster".

1. Build model, data, DDP and method; warm up with at least two synchronising steps (DDP changes its buckets after
   the first).
2. Time the steps, and read this host's interface and the ledger before and after.
3. Compare the replicas, then time the stations in steps of their own.
4. Time the same step under `no_sync`, last because it lets the replicas drift apart.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.anchors import POWERSGD_START, build_step_method, install
from thinwire.bench.models import build_workload, count_parameters
from thinwire.bench.step_cell import StepCell
from thinwire.bench.trace import time_stations, write_trace
from thinwire.handle import Handle
from thinwire.lab.counters import read_own_counters
from thinwire.lab.enter import die_with_parent
from thinwire.observe.files import write_text
from thinwire.observe.provenance import describe_origin
from thinwire.observe.stations import DECODE, ENCODE, EXCHANGE

WARMUP_STEPS = 6
LEAST_STEPS = 2
NO_SYNC_STEPS = 10
STATION_STEPS = 3
LEARNING_RATE = 1e-4
SMALLEST_BUCKET_MB = 1 / 2**20


class Trainer:
    """A model in training on this rank."""

    def __init__(self, cell: StepCell, device: torch.device) -> None:
        self.cell = cell
        self.device = device
        model, self.loss = build_workload(
            cell.model, device, cell.batch, cell.length, dist.get_rank()
        )
        self.parameters = count_parameters(model)
        method = build_step_method(cell.method, cell.density, cell.rank)
        self.settings = repr(method)
        # The weights come from one seed, and the statistics of batch norms are no gradients: nothing but gradients
        # crosses the link.
        self.ddp = DistributedDataParallel(
            model,
            init_sync=False,
            broadcast_buffers=False,
            bucket_cap_mb=_bucket_cap(cell.bucket_mb),
            gradient_as_bucket_view=True,
        )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=LEARNING_RATE)
        self.handle: Handle | None = install(self.ddp, method, self.optimizer)
        self.synchronises = cell.method != "no_sync"

    def step(self) -> None:
        """One training step as the cell's method does it."""
        self._step(synchronise=self.synchronises)

    def step_alone(self) -> None:
        """The same step without communication."""
        self._step(synchronise=False)

    def _step(self, synchronise: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        narrow = torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.amp == "bf16")
        with nullcontext() if synchronise else self.ddp.no_sync():
            with narrow:
                loss = self.loss(self.ddp)
            loss.backward()
        self.optimizer.step()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Milliseconds of each of `count` steps, without waiting for the device between them."""
        dist.barrier()
        self.wait()
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(count):
                step()
                marks.append(time.perf_counter())
            return [1000 * (after - before) for before, after in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        self.wait()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]

    def warm_up(self) -> float:
        """Seconds of the last warm-up step; ends early where steps are slow, on all ranks together.

        What the first steps spent on compiling and on tables does not count as slow.
        """
        least = POWERSGD_START + 1 if self.cell.method == "ddp-powersgd" else LEAST_STEPS
        for done in range(1, WARMUP_STEPS + 1):
            mark = time.perf_counter()
            self.step()
            self.wait()
            (last,) = self._agree(time.perf_counter() - mark)
            if done >= least and last * (WARMUP_STEPS - done) > self.cell.seconds:
                break
        return last

    def _agree(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()


def measure(trainer: Trainer, in_lab: bool, trace: Path | None) -> dict[str, Any]:
    """The cell's figures, the same on every rank."""
    cell, device = trainer.cell, trainer.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    pace = trainer.warm_up()
    count = max(LEAST_STEPS, min(cell.steps, int(cell.seconds / max(pace, 1e-6))))
    # A rank ends a step while its own last bytes still wait in the socket; a barrier comes after them.
    dist.barrier()
    link, ledger = _link_bytes(in_lab), _ledger_bytes(trainer)
    times = trainer.time_steps(trainer.step, count)
    dist.barrier()
    mine: dict[str, Any] = {
        "times": times,
        "link_bytes": _per_step(_link_bytes(in_lab), link, count),
        "ledger_bytes": _per_step(_ledger_bytes(trainer), ledger, count),
        "peak": peak_memory(device),
    }
    identical = are_identical(trainer.ddp)
    if trainer.handle is not None:
        mine |= time_stations(trainer.step, device, min(STATION_STEPS, count))
    if trace is not None:
        write_trace(trainer.step, device, trace)
    trainer.time_steps(trainer.step_alone, LEAST_STEPS)
    mine["alone"] = trainer.time_steps(trainer.step_alone, NO_SYNC_STEPS)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {
        "settings": trainer.settings,
        "parameters": trainer.parameters,
        "steps": count,
        "times": [ms for one in gathered for ms in one["times"]],
        "alone": [ms for one in gathered for ms in one["alone"]],
        "peak_memory_bytes": max(one["peak"] for one in gathered),
        "replicas_identical": identical,
        **{
            name: _mean([one.get(source) for one in gathered])
            for name, source in {
                "link_bytes": "link_bytes",
                "ledger_bytes": "ledger_bytes",
                "encode_ms": ENCODE,
                "exchange_ms": EXCHANGE,
                "decode_ms": DECODE,
            }.items()
        },
    }


def are_identical(ddp: DistributedDataParallel) -> bool:
    """Whether all ranks hold parameters whose bits have the same sum."""
    sums = [_bit_sum(parameter.detach()) for parameter in ddp.parameters()]
    mine = torch.stack(sums)
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return bool(torch.equal(lowest, highest))


def _bit_sum(values: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.contiguous().view(-1).view(whole).sum(dtype=torch.int64)


def peak_memory(device: torch.device) -> int:
    """Bytes the device's allocator held at most; on the CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _link_bytes(in_lab: bool) -> int | None:
    return read_own_counters().tx_payload if in_lab else None


def _ledger_bytes(trainer: Trainer) -> int | None:
    return None if trainer.handle is None else trainer.handle.ledger.sent_bytes()


def _per_step(after: int | None, before: int | None, count: int) -> float | None:
    return None if after is None or before is None else (after - before) / count


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _bucket_cap(megabytes: float | None) -> float | None:
    return None if megabytes is None else max(megabytes, SMALLEST_BUCKET_MB)


def _origin(device: torch.device) -> dict[str, Any]:
    origin = describe_origin()
    for package in ("transformers", "torchvision"):
        try:
            origin["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        origin["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return origin


def collective_timeout(cell: StepCell) -> float:
    """Seconds after which a collective counts as dead; short where torch's hook is known to hang."""
    return 20.0 if (cell.method, cell.backend) == ("ddp-powersgd", "gloo") else 120.0


def main(arguments: list[str]) -> None:
    die_with_parent()
    cell = StepCell(**json.loads(arguments[0]))
    device = torch.device("cpu")
    if cell.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group(
        cell.backend,
        device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=collective_timeout(cell)),
    )
    rank = dist.get_rank()
    result: dict[str, Any] = {"origin": _origin(device)}
    if rank == 0:
        write_text(Path(arguments[1]), json.dumps(result))
    trace = Path(f"{arguments[3]}-rank{rank}.json") if len(arguments) > 3 else None
    result |= measure(Trainer(cell, device), arguments[2] == "lab", trace)
    if rank == 0:
        write_text(Path(arguments[1]), json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
