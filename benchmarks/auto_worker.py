"""One rank of `h200_auto.py`: the rows of one model at several link rates, measured by the same processes.

Rank 0 speaks to the parent in lines of its standard output, `ASKS rate` and `TELLS row`. The parent changes the rate of all links
and writes it into a file, for which rank 0 waits; all others wait for rank 0.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.auto import Prospect
from thinwire.bench.step_cell import StepCell
from thinwire.bench.step_worker import RankWorkload, wrap
from thinwire.lab.counters import read_own_counters
from thinwire.lab.rates import parse_bits
from thinwire.methods.base import Adaptive
from thinwire.observe import Mark, wait_for
from thinwire.tools.provenance import describe_origin

ASKS, TELLS = "h200_auto asks for", "h200_auto has measured"
ANSWER_S = 30.0
ROW_S = 90.0
"""A row whose Auto has not settled by then ends the run; later no further method is timed for it."""
LOOK_AT_CLOCK = 8
"""Steps after which ranks agree on how late it is."""
WARM_STEPS = 2
TIMED_S = 6.0
LEAST_STEPS = 3
"""Of slow methods fewer steps are timed, so that they take no longer than that, but no fewer than these."""
NEAR = 1.25
"""A method that is predicted to take this many times Auto's own step cannot be the best one, and is not timed."""
SILENT_STEPS = 6
DENSE_AFFORDABLE_S = 1.5
PROBE_S = 0.1
DENSITY = 0.01
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-4),
    "momentum": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-5, fused=True),
}


class Job:
    """A model attached as a user would: its first weights, new buckets, a new optimizer."""

    def __init__(
        self,
        cell: StepCell,
        workload: RankWorkload,
        device: torch.device,
        method: tw.Method,
        optimizer: str,
    ) -> None:
        workload.reset()
        self.device = device
        self.began = time.monotonic()
        self._loss = workload.loss
        self._narrow = cell.amp == "bf16"
        self.ddp = wrap(workload.model, cell)
        self.optimizer = OPTIMIZERS[optimizer](self.ddp.parameters())
        self.handle = tw.attach(self.ddp, method, optimizer=self.optimizer)

    def close(self) -> None:
        self.handle.switch(tw.Dense())
        self.handle.close()

    def step(self, synchronise: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        narrow = torch.autocast(self.device.type, torch.bfloat16, enabled=self._narrow)
        with nullcontext() if synchronise else self.ddp.no_sync():
            with narrow:
                value = self._loss(self.ddp)
            value.backward()
        self.optimizer.step()

    @property
    def history(self) -> list[str]:
        """What Auto did so far."""
        pilot = self.handle.steering.pilot
        return [] if pilot is None else [f"step {step}: {what}" for step, what in pilot.history]

    def settle(self) -> int:
        """Train until measuring and trying are over; returns the steps that took."""
        taken = 0
        while not self.handle.advise().settled:
            if taken % LOOK_AT_CLOCK == LOOK_AT_CLOCK - 1 and self.late():
                raise TimeoutError(f"not settled after {taken} steps: {self.handle.advise()}")
            self.step()
            taken += 1
        return taken

    def time_steps(self, wanted: int, expected_ms: float, synchronise: bool = True) -> float:
        """Median milliseconds of the slowest rank, after steps that do not count."""
        for _ in range(WARM_STEPS):
            self.step(synchronise)
        count = max(LEAST_STEPS, min(wanted, int(1e3 * TIMED_S / expected_ms)))
        dist.barrier()
        wait_for(self.device)
        marks = [Mark(self.device)]
        for _ in range(count):
            self.step(synchronise)
            marks.append(Mark(self.device))
        return largest(
            statistics.median(b.ms_since(a) for a, b in itertools.pairwise(marks)), self.device
        )

    def late(self) -> bool:
        """Whether the row has taken too long, for all ranks alike."""
        return largest(time.monotonic() - self.began, self.device) > ROW_S


def largest(value: float, device: torch.device) -> float:
    """Over all ranks. The host waits, between steps that are timed."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def probe_link(rate: str, device: torch.device) -> float:
    """Gbit/s that a rank really sends in an all-reduce, without headers; the second one counts."""
    values = torch.zeros(int(parse_bits(rate) / 32 * PROBE_S), device=device)
    for _ in range(2):
        dist.barrier()
        wait_for(device)
        sent, began = read_own_counters().tx_payload, time.perf_counter()
        dist.all_reduce(values)
        wait_for(device)
        seconds = largest(time.perf_counter() - began, device)
        # A rank ends while its own last bytes still wait in the socket; a barrier comes after them.
        dist.barrier()
        sent = read_own_counters().tx_payload - sent
    return 8 * sent / seconds / 1e9


def compare_auto(job: Job, quality: str, steps: int) -> dict[str, Any]:
    """Auto's own steps, and those of every fixed method that could be the best one."""
    taken = job.settle()
    settling_s = time.monotonic() - job.began
    advice = job.handle.advise()
    predicted = {row.name: row.step_ms for row in advice.rows}
    # What the model takes a step without communication for; the same in all rows.
    thought_ms = next((row.step_ms - row.exposed_ms for row in advice.rows), math.nan)
    history = job.history
    chosen = advice.chosen.name if advice.chosen is not None else "dense"
    auto_ms = job.time_steps(steps, predicted.get(chosen, 1.0))
    prospect = Prospect(job.optimizer, dict(job.ddp.module.named_parameters()))
    known = prospect.candidates(Adaptive(quality=quality), dist.get_world_size())
    methods = {one.label: one.method for one in known if one.label in predicted}
    # What Auto uses for all buckets alike is a fixed method: it has just been timed.
    fixed = {chosen: auto_ms} if chosen in methods else {}
    skipped: dict[str, float] = {}
    for label in sorted(methods.keys() - fixed, key=lambda label: predicted[label]):
        if fixed and (predicted[label] > NEAR * auto_ms or job.late()):
            skipped[label] = predicted[label]
            continue
        job.handle.switch(methods[label])
        fixed[label] = job.time_steps(max(6, steps // 2), predicted[label])
    # At the end: whatever drifted meanwhile shows.
    silent_ms = job.time_steps(SILENT_STEPS, 1.0, synchronise=False)
    best = min(fixed, key=lambda label: fixed[label]) if fixed else chosen
    best_ms = fixed.get(best, auto_ms)
    return {
        "auto_ms": auto_ms,
        "chosen": chosen,
        "kept": advice.chosen.kept if advice.chosen is not None else 1.0,
        "settling_steps": taken,
        "settling_s": settling_s,
        "no_sync_ms": silent_ms,
        "thought_silent_ms": thought_ms,
        "history": history,
        "fixed_ms": fixed,
        "skipped_ms": skipped,
        "predicted_ms": predicted,
        "dense_ms": predicted.get("dense", auto_ms),
        "tried_ms": {row.name: row.measured_ms for row in advice.rows},
        "best": best,
        "best_ms": best_ms,
        "regret": auto_ms / best_ms - 1,
        "in_time": auto_ms <= max(1.10 * silent_ms, 1.02 * best_ms),
        "advice": str(advice),
    }


def compare_partial(job: Job, dense_ms: float) -> dict[str, Any]:
    """Sparse where the link needs it, against all sparse and all dense; `job` has just begun to measure, on dense steps."""
    none_ms = job.time_steps(6, dense_ms)
    job.settle()
    advice, history = job.handle.advise(), job.history
    partial_ms = job.time_steps(8, none_ms)
    whole = {row.info.name for row in job.handle.plan() if row.dense}
    job.handle.switch(tw.ADTopK(density=DENSITY))
    all_ms = job.time_steps(8, none_ms)
    sparse = {row.info.name: row.info.numel for row in job.handle.plan() if not row.dense}
    return {
        "none_ms": none_ms,
        "all_ms": all_ms,
        "partial_ms": partial_ms,
        "no_sync_ms": job.time_steps(SILENT_STEPS, 1.0, synchronise=False),
        "chosen": advice.chosen.name if advice.chosen is not None else "dense",
        "history": history,
        "tensors": len(sparse),
        "tensors_dense": len(whole & sparse.keys()),
        "elements_dense": sum(sparse[name] for name in whole & sparse.keys())
        / sum(parameter.numel() for parameter in job.ddp.parameters()),
    }


class Session:
    """All rows of one model on this rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.cell = StepCell(**settings["cell"])
        self.device = torch.device("cpu")
        if self.cell.device == "cuda":
            index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = True
        own = self.device if self.device.type == "cuda" else None
        dist.init_process_group(self.cell.backend, device_id=own)
        self.workload = RankWorkload(self.cell, self.device)
        self._settings = settings
        self._answer = Path(settings["answer"])
        self._dense_ms: dict[str, float] = dict(settings["dense_ms"])
        """What a dense step is predicted to take, by rate."""

    def run(self) -> None:
        for task in self._settings["tasks"]:
            began = time.monotonic()
            self._wait_for_rate(task["rate"])
            gbit = probe_link(task["rate"], self.device)
            row = self._auto(task) if task["what"] == "auto" else self._partial(task)
            row |= {"link_gbit": gbit, "seconds": time.monotonic() - began}
            if dist.get_rank() == 0:
                told = {**task, **row, **describe_origin()}
                print(f"{TELLS} {json.dumps(told)}", flush=True)
            gc.collect()

    def _wait_for_rate(self, rate: str) -> None:
        if dist.get_rank() == 0:
            print(f"{ASKS} {rate}", flush=True)
            until = time.monotonic() + ANSWER_S
            while not self._answer.exists() or self._answer.read_text() != rate:
                if time.monotonic() > until:
                    raise TimeoutError(f"the links were not given {rate}")
                time.sleep(0.02)
        dist.barrier()

    def _auto(self, task: dict[str, Any]) -> dict[str, Any]:
        quality = task["quality"]
        job = self._job(tw.Auto(quality=quality), task["optimizer"])
        row = compare_auto(job, quality, self._settings["steps"])
        job.close()
        self._dense_ms[task["rate"]] = row["dense_ms"]
        return row

    def _partial(self, task: dict[str, Any]) -> dict[str, Any]:
        dense_ms = self._dense_ms[task["rate"]]
        if dense_ms > 1e3 * DENSE_AFFORDABLE_S:
            return {"skipped": f"dense is predicted to take {dense_ms / 1e3:.1f} s"}
        job = self._job(tw.ADTopK(density=DENSITY, partial=True), task["optimizer"])
        row = compare_partial(job, dense_ms)
        job.close()
        return row

    def _job(self, method: tw.Method, optimizer: str) -> Job:
        return Job(self.cell, self.workload, self.device, method, optimizer)


if __name__ == "__main__":
    Session(json.loads(sys.argv[1])).run()
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads can abort while the interpreter shuts down.
    os._exit(0)
