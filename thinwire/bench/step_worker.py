"""One rank of some cells of the step benchmark: `python -m thinwire.bench.step_worker CELLS RESULTS PLACE TRACES PROFILES`.

CELLS is a JSON list of cells that share their setup. Rank 0 writes RESULTS, a file in which every line is the JSON of a
cell that has ended; PLACE is "lab", "local" or "cluster". TRACES is the folder for every rank's traces, PROFILES that for
profiles of rank 0's host; "-" for none.

Model and data are built once. For each cell:

1. Wrap the model in DDP (a sharded one is wrapped already), whose weights are again what they were; warm up with at least two synchronising steps (DDP
   changes its buckets after the first), and three of a handle, which plans for the new ones.
2. Time the steps, and read this host's interface and the ledger before and after.
3. Compare the replicas, then time the stations in steps of their own.
4. Time the same step under `no_sync`, last because it lets the replicas drift apart.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.bench.anchors import POWERSGD_START, Anchor, build_step_method, install
from thinwire.bench.host_profile import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    PROFILED_STEPS,
    Span,
    no_span,
    profile_file,
    profile_steps,
    write_profile,
)
from thinwire.bench.local_methods import LocalMethod
from thinwire.bench.model_shapes import hash_built
from thinwire.bench.models import build_workload, count_parameters
from thinwire.bench.step_cell import StepCell
from thinwire.bench.step_places import NO_FOLDER, STORE_VARIABLE, trace_prefix
from thinwire.bench.trace import TRACED_STEPS, time_stations, write_trace
from thinwire.lab.counters import read_own_counters
from thinwire.methods import Method
from thinwire.observe import DECODE, ENCODE, EXCHANGE
from thinwire.tools.clock import Mark, wait_for
from thinwire.tools.processes import signal_at_parents_end
from thinwire.tools.provenance import describe_origin

WARMUP_STEPS = 6
LEAST_STEPS = 2
PLANNING_STEPS = 3
"""Of a handle: the first step has one bucket, the second DDP's own, planned anew; the third is the first like all others."""
NO_SYNC_STEPS = 10
STATION_STEPS = 3
LEARNING_RATE = 1e-4
SMALLEST_BUCKET_MB = 1 / 2**20


class RankWorkload:
    """A model and its data on this rank."""

    def __init__(self, cell: StepCell, device: torch.device) -> None:
        self.model, self.loss = build_workload(
            cell.model, device, cell.batch, cell.length, dist.get_rank()
        )
        self.parameters = count_parameters(self.model)
        self.shapes = hash_built(cell.model, self.model)
        self.mesh = shard(self.model, cell, device) if cell.parallel == "hsdp" else None
        self._state = list(self.model.state_dict().values())
        self._first = [value.clone() for value in self._state]

    @torch.no_grad()
    def reset(self) -> None:
        """Make all weights what they were at first."""
        for value, first in zip(self._state, self._first, strict=True):
            value.copy_(first)
        self.model.zero_grad(set_to_none=True)


def make_optimizer(
    method: Method | Anchor | LocalMethod, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """SGD without momentum, so that a step is little else than its passes; AdamW for methods that take over from it."""
    if isinstance(method, tw.AdamScale):
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


class CellTrainer:
    """A model in training on this rank, by the method of one cell."""

    def __init__(self, cell: StepCell, workload: RankWorkload, device: torch.device) -> None:
        self.cell = cell
        self.device = device
        workload.reset()
        self.loss = workload.loss
        self.parameters = workload.parameters
        self.shapes = workload.shapes
        method = build_step_method(cell.method, cell.density, cell.rank, cell.every)
        self.settings = repr(method)
        self.mesh = workload.mesh
        bare = self.mesh is not None or isinstance(method, LocalMethod)
        self.model = workload.model if bare else wrap(workload.model, cell)
        self.optimizer = make_optimizer(method, self.model.parameters())
        self.local = None
        if isinstance(method, LocalMethod):
            self.local = method.begin(self.model, self.optimizer)
            self.handle: tw.Handle | None = self.local.handle
        else:
            self.handle = install(self.model, method, self.optimizer)
        self.synchronises = cell.method != "no_sync"
        self.period = cell.every or 1
        """Steps from one exchange to the next of the same parameters."""

    def close(self) -> None:
        """Behind the last step."""
        if isinstance(self.model, FSDPModule) and hasattr(self.model, "reset_iter_state"):
            # Steps without traffic between hosts keep their sums for one that has some. Before torch 2.13 they stay.
            self.model.reset_iter_state()
        if self.local is not None:
            self.local.close()
        elif self.handle is not None:
            self.handle.switch(tw.Dense())
            self.handle.close()

    def step(self) -> None:
        """One training step as the cell's method does it."""
        self._step(synchronise=self.synchronises)

    def step_watched(self, span: Span) -> None:
        """The same; `span` times its phases."""
        self._step(synchronise=self.synchronises, span=span)

    def step_alone(self) -> None:
        """The same step without communication."""
        self._step(synchronise=False)

    def _step(self, synchronise: bool, span: Span = no_span) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        narrow = torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.amp == "bf16")
        with nullcontext() if synchronise else self._alone():
            with span(FORWARD), narrow:
                loss = self.loss(self.model)
            with span(BACKWARD):
                loss.backward()
        with span(OPTIMIZER):
            self.optimizer.step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing crosses the link between hosts."""
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
            return
        if self.local is not None:
            # Between two rounds nothing is sent, and from now on there is no other.
            self.local.close()
            yield
            return
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_all_reduce(False)
        yield
        self.model.set_requires_all_reduce(True)

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Milliseconds of each of `count` steps, without waiting for the device between them."""
        dist.barrier()
        wait_for(self.device)
        marks = [Mark(self.device)]
        for _ in range(count):
            step()
            marks.append(Mark(self.device))
        return [after.ms_since(before) for before, after in itertools.pairwise(marks)]

    def warm_up(self) -> float:
        """Seconds of the last warm-up step; ends early where steps are slow, on all ranks together.

        What the first steps spent on compiling and on tables does not count as slow.
        """
        if self.local is not None:
            mark = time.perf_counter()
            for _ in range(self.period):
                self.step()
            wait_for(self.device)
            return self._agree((time.perf_counter() - mark) / self.period)[0]
        least = LEAST_STEPS if self.handle is None else PLANNING_STEPS
        if self.cell.method == "ddp-powersgd":
            least = POWERSGD_START + 1
        for done in range(1, WARMUP_STEPS + 1):
            mark = time.perf_counter()
            self.step()
            wait_for(self.device)
            (last,) = self._agree(time.perf_counter() - mark)
            if done >= least and last * (WARMUP_STEPS - done) > self.cell.seconds:
                break
        return last

    def _agree(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()


def measure(
    trainer: CellTrainer, in_lab: bool, traces: Path | None, profiles: Path | None
) -> dict[str, Any]:
    """The cell's figures, the same on every rank; traces and profiles go to their folders."""
    cell, device = trainer.cell, trainer.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    pace = trainer.warm_up()
    count = max(LEAST_STEPS, min(cell.steps, int(cell.seconds / max(pace, 1e-6))))
    # Whole rounds: most local steps send nothing.
    count = max(LEAST_STEPS, count // trainer.period) * trainer.period if trainer.local else count
    # A rank ends a step while its own last bytes still wait in the socket; a barrier comes after them.
    dist.barrier()
    link, ledger = _link_bytes(in_lab), _ledger_bytes(trainer)
    times = trainer.time_steps(trainer.step, count)
    dist.barrier()
    mine: dict[str, Any] = {
        "times": mean_rounds(times, trainer.period),
        "link_bytes": _per_step(_link_bytes(in_lab), link, count),
        "ledger_bytes": _per_step(_ledger_bytes(trainer), ledger, count),
        "peak": peak_memory(device),
    }
    identical = are_identical(trainer)
    if trainer.handle is not None:
        mine |= time_stations(trainer.step, device, max(trainer.period, min(STATION_STEPS, count)))
    if profiles is not None:
        watched = max(trainer.period, min(PROFILED_STEPS, count))
        found = profile_steps(cell, trainer.step_watched, watched)
        if dist.get_rank() == 0:
            write_profile(profile_file(profiles, cell), found)
    if traces is not None:
        trace = Path(f"{trace_prefix(traces, cell)}-rank{dist.get_rank()}.json")
        # Of local steps a whole round.
        write_trace(trainer.step_watched, device, trace, max(TRACED_STEPS, trainer.period))
    trainer.time_steps(trainer.step_alone, LEAST_STEPS)
    mine["alone"] = trainer.time_steps(trainer.step_alone, NO_SYNC_STEPS)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {
        "settings": trainer.settings,
        "parameters": trainer.parameters,
        "shapes": trainer.shapes,
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


def mean_rounds(times: Sequence[float], period: int) -> list[float]:
    """The mean step of every round; of methods that exchange in every step, the steps themselves."""
    return [statistics.fmean(times[i : i + period]) for i in range(0, len(times), period)]


def wrap(model: nn.Module, cell: StepCell) -> DistributedDataParallel:
    # The weights come from one seed, and the statistics of batch norms are no gradients: nothing but gradients
    # crosses the link.
    return DistributedDataParallel(
        model,
        init_sync=False,
        broadcast_buffers=False,
        bucket_cap_mb=_bucket_cap(cell.bucket_mb),
        gradient_as_bucket_view=True,
    )


def shard(model: nn.Module, cell: StepCell, device: torch.device) -> DeviceMesh:
    """Shard every layer over the workers of a host, and copy it between hosts."""
    mesh = init_device_mesh(
        device.type,
        (cell.workers // cell.per_host, cell.per_host),
        mesh_dim_names=("replicate", "shard"),
    )
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    for layer in (layer for layers in lists for layer in layers):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mesh


def are_identical(trainer: CellTrainer) -> bool:
    """Whether all replicas hold parameters whose bits have the same sum."""
    group = None if trainer.mesh is None else trainer.mesh.get_group("replicate")
    local = [_local(parameter.detach()) for parameter in trainer.model.parameters()]
    mine = torch.stack([_bit_sum(values) for values in local])
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return bool(torch.equal(lowest, highest))


def _local(values: Tensor) -> Tensor:
    return values.to_local() if isinstance(values, DTensor) else values


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


def _ledger_bytes(trainer: CellTrainer) -> int | None:
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
    signal_at_parents_end(signal.SIGKILL)
    cells = [StepCell(**one) for one in json.loads(arguments[0])]
    first = cells[0]
    device = torch.device("cpu")
    if first.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    store = os.environ.get(STORE_VARIABLE)
    dist.init_process_group(
        first.backend,
        init_method=None if store is None else f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=min(map(collective_timeout, cells))),
    )
    rank = dist.get_rank()
    workload = RankWorkload(first, device)
    traces, profiles = (None if folder == NO_FOLDER else Path(folder) for folder in arguments[3:5])
    in_lab = arguments[2] == "lab"
    for cell in cells:
        trainer = CellTrainer(cell, workload, device)
        result = {"origin": _origin(device), **measure(trainer, in_lab, traces, profiles)}
        trainer.close()
        if rank == 0:
            with Path(arguments[1]).open("a") as file:
                file.write(json.dumps(result) + "\n")
        del trainer
        gc.collect()
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
