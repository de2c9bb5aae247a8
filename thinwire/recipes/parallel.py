"""Parallel: where the data-parallel workers of a run are. The training loop is the same wherever that is.

`Workers` says who this process stands for and brings the processes together; `Replica` is a model at work there.
Real workers are one per process, joined by torch.distributed (`ProcessWorkers`). Simulated ones are all in one process
and bring a `Replica` of their own, which must do what N processes do:

1. `backward(step)`: for every worker w of `Workers.ranks` and each of its micro-batches m in order, the gradient of
   `step.loss(module, w, m)`, summed over m; then one exchange of the workers' gradients. Afterwards `p.grad` of
   `model` is the averaged update, times the loss scale if there is one.
2. All workers start each step from the same parameters. Buffers (running statistics of batch norms) are those of
   worker 0: what the others' forward passes write there is dropped.
3. The optimizer steps once, in the loop.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.methods import Method
from thinwire.observe import Ledger, Stats
from thinwire.plan import PlanReport
from thinwire.recipes.config import Running
from thinwire.recipes.step import Step
from thinwire.tools.clock import Mark


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """What a model is put to work with."""

    model: nn.Module
    """On the device already, with the same parameters in every process."""
    method: Method
    optimizer: torch.optim.Optimizer
    """Over the model's parameters; methods that own momentum take it over from here."""
    scaler: torch.amp.GradScaler
    deterministic: bool


class Workers(ABC):
    """The workers of a job, seen from one process."""

    world: int
    """All data-parallel workers."""
    ranks: range
    """Those that this process stands for."""
    process: int
    """This process among `processes`, which share evaluation and saving; process 0 writes the run folder."""
    processes: int
    device: torch.device

    @abstractmethod
    def attach(self, attachment: Attachment) -> Replica:
        """Collective: a model whose gradients are exchanged by a method."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Collective: the plain value of every process, in order, in every process."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Collective: the sum over processes, in place."""


class Replica(ABC):
    """A model in training on the workers of this process."""

    model: nn.Module
    """The bare model."""

    @abstractmethod
    def backward(self, step: Step) -> tuple[Mark, Mark] | None:
        """All workers' gradients of one step, averaged, in `p.grad`, which must be None before.

        Returns when computing ended and when the last exchange ended: in between communication was exposed. None where
        nothing travels.
        """

    @abstractmethod
    def share_buffers(self) -> None:
        """Collective: every process gets worker 0's buffers."""

    @abstractmethod
    def stats(self) -> Stats:
        """What worker 0 sent, or the first worker of this process."""

    @abstractmethod
    def log(self, writer: Any) -> None:
        """The handle's own numbers of that worker, to whatever `handle.log` writes to."""

    @abstractmethod
    def plan(self) -> PlanReport:
        """What happens to every parameter, and why."""

    def costs(self) -> dict[str, Any] | None:
        """Memory and time of workers that are simulated, the fields of `SimulationReport`; None for real ones."""
        return None

    @abstractmethod
    def ledgers(self) -> dict[int, Ledger]:
        """By worker of this process."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the workers of this process hold back: plain tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


# -- one worker per process ------------------------------------------------------------------------------------


def join(running: Running, device: torch.device, store: Path | None = None) -> Workers:
    """Collective: the workers of a job, as seen from this process. They meet in a file, or where their launcher says."""
    if running.simulate_workers is not None:
        from thinwire.recipes.simulated import SimulatedWorkers

        return SimulatedWorkers(running.simulate_workers, device, graph=running.graph)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=None if store is None else f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=running.timeout),
    )
    return ProcessWorkers(device)


class ProcessWorkers(Workers):
    """The processes of torch's default group."""

    def __init__(self, device: torch.device) -> None:
        self.process = dist.get_rank()
        self.world = self.processes = dist.get_world_size()
        self.ranks = range(self.process, self.process + 1)
        self.device = device

    def attach(self, attachment: Attachment) -> Replica:
        return ProcessReplica(attachment, self)

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value)
        return gathered

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values


class ProcessReplica(Replica):
    """One worker's model under DistributedDataParallel."""

    def __init__(self, attachment: Attachment, workers: ProcessWorkers) -> None:
        self.model = attachment.model
        self._workers = workers
        # Batch statistics are no gradients: they are shared when somebody looks, not in every forward.
        self._ddp = DistributedDataParallel(self.model, broadcast_buffers=False)
        self._handle = tw.attach(
            self._ddp,
            attachment.method,
            optimizer=attachment.optimizer,
            grad_scaler=attachment.scaler,
            deterministic=attachment.deterministic,
        )

    def backward(self, step: Step) -> tuple[Mark, Mark] | None:
        (worker,) = self._workers.ranks
        computed: list[Mark] = []
        for micro in range(step.micro_batches):
            last = micro == step.micro_batches - 1
            with nullcontext() if last else self._ddp.no_sync():
                loss = step.loss(self._ddp, worker, micro)
                if last:
                    # Before DDP's own callback, in which it waits for the exchange: callbacks run in turn.
                    loss.register_hook(lambda _: call_after_backward(self._note(computed)))
                loss.backward()
        return computed[0], Mark(self._workers.device)

    def _note(self, computed: list[Mark]) -> Any:
        return lambda: computed.append(Mark(self._workers.device))

    def share_buffers(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def stats(self) -> Stats:
        return self._handle.stats()

    def log(self, writer: Any) -> None:
        self._handle.log(writer)

    def plan(self) -> PlanReport:
        return self._handle.plan()

    def ledgers(self) -> dict[int, Ledger]:
        return {self._handle.rank: self._handle.ledger}

    def state_dict(self) -> dict[str, Any]:
        return self._handle.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._handle.load_state_dict(state)

    def close(self) -> None:
        self._handle.close()


def call_after_backward(action: Any) -> None:
    """From inside a backward pass: `action` is called when all of its gradients are computed."""
    torch.autograd.Variable._execution_engine.queue_callback(action)
