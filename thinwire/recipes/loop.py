"""The training loop, the same for every task and every method."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import attach
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.methods.base import Method
from thinwire.observe.ledger import Line, ledger_lines
from thinwire.observe.metrics import MetricsLog
from thinwire.observe.results import Row
from thinwire.recipes.config import Training
from thinwire.recipes.tasks import Data, Examples, Task

LOG_EVERY = 10
"""Steps whose losses are averaged over the workers in one go, so that looking does not slow the step down."""


def train(
    task: Task,
    data: Data,
    training: Training,
    name: str,
    method: Method,
    log: MetricsLog,
    traffic: list[Line],
) -> Row:
    """Train the task once with one method, on all ranks of the default group; `traffic` gets this rank's ledger."""
    began = time.perf_counter()
    world = dist.get_world_size()
    steps_per_epoch = count_steps(len(data.train), world, training.batch_size)
    total_steps = training.epochs * steps_per_epoch

    torch.manual_seed(training.seed)
    model = DistributedDataParallel(task.build())
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    handle = attach(model, method, optimizer=optimizer)
    parameters = sum(p.numel() for p in model.parameters())
    log.add([{"run": name, "event": "start", "steps": total_steps, "parameters": parameters}])
    recorder = StepRecorder(name, handle, log)

    score = math.nan
    for epoch in range(training.epochs):
        model.train()
        for inputs, targets in batches(data.train, training, epoch):
            recorder.begin_step()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(training, recorder.step, total_steps)
            loss = task.loss(model(inputs), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            recorder.end_step(loss)
        recorder.flush()
        score = evaluate(model.module, task, data.test)
        log.add([{"run": name, "event": "test", "step": recorder.step, "score": score}])

    stats = handle.stats()
    traffic += ledger_lines(name, handle.rank, handle.ledger)
    handle.close()
    return Row(
        method=name,
        settings=f"{method!r}, lr={training.lr:g}",
        asked_density=getattr(method, "density", None),
        density=stats.density,
        score=score,
        steps=stats.steps,
        parameters=parameters,
        dense_bytes_per_step=stats.dense_bytes_per_step,
        wire_bytes_per_step=stats.wire_bytes_per_step,
        ratio=stats.ratio,
        ms_per_step=statistics.median(recorder.milliseconds),
        replicas_identical=are_replicas_identical(model.module),
        seconds=time.perf_counter() - began,
    )


def count_steps(examples: int, world: int, batch_size: int) -> int:
    """Steps per epoch; the rest that does not fill a batch on every worker waits for another shuffle."""
    steps = examples // (world * batch_size)
    if steps == 0:
        raise UsageError(
            f"batch_size is {batch_size} on {world} workers; together they must take "
            f"at most the {examples} training examples in a step"
        )
    return steps


def batches(examples: Examples, training: Training, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of one epoch: one shuffle common to all ranks, dealt out in turn."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(training.seed * 100_003 + epoch)
    mine = torch.randperm(len(examples), generator=generator)[rank::world]
    for step in range(count_steps(len(examples), world, training.batch_size)):
        yield examples.at(mine[step * training.batch_size : (step + 1) * training.batch_size])


def learning_rate(training: Training, step: int, total_steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero; `step` counts from 0."""
    if step < training.warmup_steps:
        return training.lr * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, total_steps - training.warmup_steps)
    return training.lr * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, examples: Examples) -> float:
    """Mean test score; every rank scores its share."""
    model.eval()
    share = torch.arange(dist.get_rank(), len(examples), dist.get_world_size())
    inputs, targets = examples.at(share)
    total = torch.zeros((), dtype=torch.float64)
    if len(share):
        total += task.score(model(inputs), targets).double().sum()
    dist.all_reduce(total)
    return total.item() / len(examples)


def are_replicas_identical(model: nn.Module) -> bool:
    """Whether all ranks hold the same bits in all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


class StepRecorder:
    """Collects what each step did and hands it to the log a few steps at a time."""

    def __init__(self, name: str, handle: Handle, log: MetricsLog) -> None:
        self.step = 0
        self.milliseconds: list[float] = []
        self._name = name
        self._handle = handle
        self._log = log
        self._began = 0.0
        self._losses: list[Tensor] = []
        self._sent: list[int] = []
        self._sent_before = 0

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self, loss: Tensor) -> None:
        self.milliseconds.append(1000 * (time.perf_counter() - self._began))
        sent = self._handle.ledger.sent_bytes()
        self._sent.append(sent - self._sent_before)
        self._sent_before = sent
        self._losses.append(loss.detach())
        self.step += 1
        if len(self._losses) == LOG_EVERY:
            self.flush()

    def flush(self) -> None:
        """Collective: average the losses since the last flush and log their steps."""
        if not self._losses:
            return
        losses = torch.stack(self._losses).double()
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        count = len(losses)
        self._log.add(
            [
                {
                    "run": self._name,
                    "event": "step",
                    "step": self.step - count + 1 + i,
                    "loss": losses[i].item(),
                    "wire_bytes": self._sent[i],
                    "ms": round(self.milliseconds[i - count], 3),
                }
                for i in range(count)
            ]
        )
        self._losses.clear()
        self._sent.clear()
