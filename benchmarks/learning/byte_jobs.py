"""The workers of a cell: those that exchange gradients in every step, and those that take steps of their own in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import thinwire as tw
from learning.byte_cells import LOCAL, Cell, build_method
from learning.byte_model import ByteGPT, compute_losses

DECAY = 0.1
BUCKET_MB = 512
"""All of a model: nothing overlaps with anything here, and fewer buckets are fewer launches."""


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return make_adamw({n: (p, p.dim() > 1) for n, p in model.named_parameters()}, lr)


def make_adamw(
    weights: Mapping[str, tuple[Tensor, bool]], lr: float | Tensor, **settings: Any
) -> torch.optim.Optimizer:
    """`weights` say of each whether it is decayed."""
    groups = [
        {"params": [w for w, decayed in weights.values() if decayed], "weight_decay": DECAY},
        {"params": [w for w, decayed in weights.values() if not decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), **settings)


class Replayed:
    """A function without arguments; on a GPU it is captured as a graph when it has run a few times."""

    WARM_UP = 3

    def __init__(self, compute: Callable[[], None], device: torch.device) -> None:
        self._compute = compute
        self._on_gpu = device.type == "cuda"
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        self._runs += 1
        if self._graph is not None:
            self._graph.replay()
        elif self._on_gpu and self._runs > self.WARM_UP:
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                self._compute()
            self._graph.replay()
        elif self._on_gpu:
            # What is captured later must not have run on the usual stream before.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self._compute()


class Job(Protocol):
    """All workers of a cell."""

    model: nn.Module
    """That is tested."""

    def step(self, windows: Tensor, rate: float) -> None:
        """One step of everybody, with the bytes [workers, batch, context + 1]."""

    def sent_bytes(self) -> int:
        """Of one worker so far."""

    def memory_bytes(self) -> int:
        """Of one worker, beside the model and its optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def room_for_windows(cell: Cell, device: torch.device) -> Tensor:
    """Where a captured pass reads its bytes."""
    shape = (cell.workers, cell.batch, cell.context + 1)
    return torch.zeros(shape, dtype=torch.long, device=device)


class CommonSteps:
    """Workers that exchange gradients in every step."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell = cell
        self.model = ByteGPT(cell).to(device)
        self.optimizer = make_optimizer(self.model, cell.lr)
        self.simulation = tw.simulate(
            self.model,
            build_method(cell),
            workers=cell.workers,
            optimizer=self.optimizer,
            policy=[tw.rule("positions", dense=True)],
            bucket_mb=BUCKET_MB,
        )
        self._windows = room_for_windows(cell, device)
        self._gradients: dict[str, Tensor] = {}
        self._pass = Replayed(self._compute, device)

    def step(self, windows: Tensor, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._windows.copy_(windows)
        self._pass.run()
        self.simulation.put_gradients(self._gradients)
        self.simulation.exchange()
        self.optimizer.step()

    def _compute(self) -> None:
        """The gradients of all workers, each with its own bytes and the common weights."""
        workers = self.cell.workers
        weights = {
            name: parameter.detach().expand(workers, *parameter.shape).requires_grad_()
            for name, parameter in self.model.named_parameters()
        }
        given, wanted = self._windows[..., :-1], self._windows[..., 1:]
        losses = compute_losses(weights, self.cell, given, wanted)
        gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
        self._gradients = dict(zip(weights, gradients, strict=True))

    def sent_bytes(self) -> int:
        return self.simulation.handles[0].ledger.sent_bytes()

    def memory_bytes(self) -> int:
        return self.simulation.stats().memory_bytes

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "simulation": self.simulation.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.simulation.load_state_dict(state["simulation"])


class LocalWorkers:
    """Workers that take inner steps of their own and exchange differences once in a round."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        every, method, settings = LOCAL[cell.method]
        self.cell = cell
        models = [ByteGPT(cell).to(device) for _ in range(cell.workers)]
        self.model = models[0]
        self.weights, _ = torch.func.stack_module_state(models)
        """By name, all workers' in one tensor; each worker's model looks into it."""
        for worker, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.data = self.weights[name].data[worker]
        self.rate = torch.tensor(cell.lr, device=device)
        self.optimizer = make_adamw(
            {n: (p, p.dim() > 2) for n, p in self.weights.items()},
            self.rate,
            capturable=device.type == "cuda",
            fused=device.type == "cuda",
        )
        self.simulation = tw.LocalSteps.simulate(
            models,
            # They only say what is trained: all workers step together.
            [make_optimizer(model, cell.lr) for model in models],
            method,
            every=every,
            policy=[tw.rule("positions", dense=True)],
            bucket_mb=BUCKET_MB,
            **settings,
        )
        self._windows = room_for_windows(cell, device)
        self._pass = Replayed(self._compute, device)

    def step(self, windows: Tensor, rate: float) -> None:
        self.rate.fill_(rate)
        self._windows.copy_(windows)
        self._pass.run()
        self.simulation.step()
        if self.simulation.workers[0].lost_rounds:
            raise RuntimeError("a round was lost: some worker's parameters are not finite")

    def _compute(self) -> None:
        given, wanted = self._windows[..., :-1], self._windows[..., 1:]
        self.optimizer.zero_grad(set_to_none=True)
        compute_losses(self.weights, self.cell, given, wanted).sum().backward()
        self.optimizer.step()

    def sent_bytes(self) -> int:
        return self.simulation.workers[0].handle.ledger.sent_bytes()

    def memory_bytes(self) -> int:
        first = self.simulation.workers[0]
        return first.handle.stats().memory_bytes + first.point.nbytes()

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "simulation": self.simulation.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        # Loading puts a copy of the rate there, which nobody fills.
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.simulation.load_state_dict(state["simulation"])
