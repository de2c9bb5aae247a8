"""A byte-level GPT on text files, trained by simulated workers: one cell of the studies of Adam and of local steps.

Everything that differs between cells is in `Cell`; data, batches and the start of the weights depend on the seed alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

import thinwire as tw

WARM_UP = 100
DECAY = 0.1
LAST_RATE = 0.1
"""Of the learning rate at the end of the cosine, as a share."""
TESTS = 10
"""In a run."""
TEST_BATCHES = 40


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training."""

    method: str
    seed: int = 0
    lr: float = 1e-3
    steps: int = 1500
    start: int = 5
    """Dense steps at the beginning, in per cent of all; 5 are 75 of 1500."""
    workers: int = 8
    layers: int = 4
    width: int = 256
    context: int = 256
    batch: int = 8
    """Sequences of every worker and step."""
    narrow: bool = False
    """Forward and backward in bf16 autocast."""

    @property
    def key(self) -> str:
        size = f"{self.layers}x{self.width}x{self.batch}-{self.steps}"
        return f"{self.method}-{size}-lr{self.lr:g}-start{self.start}-seed{self.seed}"


REFRESH = tw.memory.Refresh(every=50)
PLAIN: dict[str, tw.Method] = {
    "int8": tw.Quantized(bits=8),
    "int4": tw.Quantized(bits=4),
    "bit1": tw.Quantized(bits=1),
    "topk1": tw.TopK(density=0.01),
}
SCALED: dict[str, tuple[tw.Method, dict[str, Any]]] = {
    "topk1-adam": (tw.TopK(density=0.01), {}),
    "adtopk1-adam": (tw.ADTopK(density=0.01), {}),
    "topk10-adam-refresh": (tw.TopK(density=0.1), {"divisor": REFRESH, "limit": 10.0}),
    "bit2-adam": (tw.Quantized(bits=2, block=64), {}),
    "bit2-adam-refresh": (tw.Quantized(bits=2, block=64), {"divisor": REFRESH, "limit": 3.0}),
    "bit1-adam": (tw.Quantized(bits=1), {}),
    "bit1-adam-refresh": (tw.Quantized(bits=1), {"divisor": REFRESH, "limit": 3.0}),
    **{
        f"bit1-adam-refresh-sums{bits}": (
            tw.Quantized(bits=1, sum_bits=bits),
            {"divisor": REFRESH, "limit": 3.0},
        )
        for bits in (2, 4, 8)
    },
    "bit1-adam-refresh-block32": (
        tw.Quantized(bits=1, block=32),
        {"divisor": REFRESH, "limit": 3.0},
    ),
    "bit1-adam-refresh-free": (tw.Quantized(bits=1), {"divisor": REFRESH}),
}
LOCAL: dict[str, tuple[int, tw.Method, dict[str, Any]]] = {
    # DiLoCo's outer optimizer is the default of local steps.
    **{f"diloco-{every}": (every, tw.Dense(), {}) for every in (8, 32)},
    **{
        f"sparseloco-{every}": (
            every,
            tw.Compose(
                select=tw.select.ChunkwiseTopK(1 / 64, chunk=4096),
                memory=tw.memory.Residual(beta=0.95),
                wire=tw.wire.Wire(values="int2", indices="rice"),
            ),
            {"outer": {"lr": 1.0}},
        )
        for every in (8, 32)
    },
}
"""(inner steps of a round, how differences are sent, settings of `tw.LocalSteps`)."""
METHODS = ("dense", *PLAIN, *SCALED, *LOCAL)
"""The names in the tables."""


def build_method(cell: Cell) -> tw.Method:
    """All of them begin with the same dense steps."""
    start = max(1, cell.steps * cell.start // 100)
    if cell.method in PLAIN:
        return tw.Timeline(phases=((0, tw.Dense()), (start, PLAIN[cell.method])))
    if cell.method in SCALED:
        method, settings = SCALED[cell.method]
        return tw.AdamScale(method=method, start=start, **settings)
    return tw.Dense()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.norm2 = nn.RMSNorm(width)
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.grow = nn.Linear(width, 4 * width, bias=False)
        self.shrink = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.inputs(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.shrink(functional.gelu(self.grow(self.norm2(x))))


class ByteGPT(nn.Module):
    """Bytes [B, T] -> the mean loss of the next ones, in nats. The decoder is the embedding."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.narrow = cell.narrow
        self.embedding = nn.Embedding(256, cell.width)
        self.positions = nn.Parameter(torch.empty(cell.context, cell.width))
        heads = max(1, cell.width // 64)
        self.blocks = nn.Sequential(*(Block(cell.width, heads) for _ in range(cell.layers)))
        self.norm = nn.RMSNorm(cell.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_stream = name.endswith(("output.weight", "shrink.weight"))
                shrunk = 1 / math.sqrt(2 * cell.layers) if into_stream else 1.0
                nn.init.normal_(parameter, std=0.02 * shrunk)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast(given.device.type, torch.bfloat16, enabled=self.narrow):
            x = self.norm(self.blocks(self.embedding(given) + self.positions))
            logits = x @ self.embedding.weight.T
        return functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def read_bytes(folder: Path, part: str, device: torch.device) -> Tensor:
    """All of `folder`'s wikitext file of that part (train, valid), below any folder."""
    found = sorted(
        path for path in folder.rglob(f"*{part}*") if path.is_file() and "wiki" in str(path).lower()
    )
    if not found:
        raise FileNotFoundError(f"there is no wikitext file named *{part}* below {folder}")
    content = bytearray(found[0].read_bytes())
    return torch.frombuffer(content, dtype=torch.uint8).long().to(device)


def draw_batch(text: Tensor, cell: Cell, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(bytes, the next ones), [batch, context] each."""
    begins = torch.randint(len(text) - cell.context - 1, (cell.batch,), generator=generator)
    places = begins.to(text.device)[:, None] + torch.arange(cell.context + 1, device=text.device)
    window = text[places]
    return window[:, :-1], window[:, 1:]


def make_optimizer(model: nn.Module, lr: float | Tensor, **settings: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), **settings)


Batch = tuple[Tensor, Tensor]


class Job(Protocol):
    """All workers of a cell."""

    model: nn.Module
    """That is tested."""

    def step(self, batches: Sequence[Batch], rate: float) -> None: ...

    def sent_bytes(self) -> int:
        """Of one worker so far."""

    def memory_bytes(self) -> int:
        """Of one worker, beside the model and its optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CommonSteps:
    """Workers that exchange gradients in every step."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.model = ByteGPT(cell).to(device)
        self.optimizer = make_optimizer(self.model, cell.lr)
        self.simulation = tw.simulate(
            self.model,
            build_method(cell),
            workers=cell.workers,
            optimizer=self.optimizer,
            policy=[tw.rule("positions", dense=True)],
            graph=device.type == "cuda",
        )

    def step(self, batches: Sequence[Batch], rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.simulation.step(self.model, batches)
        self.optimizer.step()

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


class InnerStep:
    """One worker's own step; on a GPU captured as a graph, because a small model is bound by its launches."""

    WARM_UP = 3

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.model = ByteGPT(cell).to(device)
        on_gpu = device.type == "cuda"
        self.rate = torch.tensor(cell.lr, device=device)
        self.optimizer = make_optimizer(self.model, self.rate, capturable=on_gpu)
        self._given = torch.zeros(2, cell.batch, cell.context, dtype=torch.long, device=device)
        self._taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def take(self, batch: Batch, rate: float) -> None:
        self.rate.fill_(rate)
        self._given.copy_(torch.stack(batch))
        self._taken += 1
        if self._graph is not None:
            self._graph.replay()
        elif self.rate.is_cuda and self._taken > self.WARM_UP:
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                self._compute()
            self._graph.replay()
        elif self.rate.is_cuda:
            # What is captured later must not have run on the usual stream before.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self._compute()

    def _compute(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(*self._given).backward()
        self.optimizer.step()


class LocalWorkers:
    """Workers that take inner steps of their own and exchange differences once in a round."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        every, method, settings = LOCAL[cell.method]
        self.workers = [InnerStep(cell, device) for _ in range(cell.workers)]
        self.model = self.workers[0].model
        self.simulation = tw.simulate_local(
            [worker.model for worker in self.workers],
            [worker.optimizer for worker in self.workers],
            method,
            every=every,
            policy=[tw.rule("positions", dense=True)],
            **settings,
        )

    def step(self, batches: Sequence[Batch], rate: float) -> None:
        for worker, batch in zip(self.workers, batches, strict=True):
            worker.take(batch, rate)
        self.simulation.step()

    def sent_bytes(self) -> int:
        return self.simulation.workers[0].handle.ledger.sent_bytes()

    def memory_bytes(self) -> int:
        first = self.simulation.workers[0]
        return first.handle.stats().memory_bytes + first.point.nbytes()

    def state_dict(self) -> dict[str, Any]:
        return {
            "models": [worker.model.state_dict() for worker in self.workers],
            "optimizers": [worker.optimizer.state_dict() for worker in self.workers],
            "simulation": self.simulation.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = zip(self.workers, state["models"], state["optimizers"], strict=True)
        for worker, model, optimizer in parts:
            worker.model.load_state_dict(model)
            worker.optimizer.load_state_dict(optimizer)
            # Loading puts a copy of the rate there, which nobody fills.
            for group in worker.optimizer.param_groups:
                group["lr"] = worker.rate
        self.simulation.load_state_dict(state["simulation"])


class Training:
    """One cell at work; it can be put aside and taken up again."""

    def __init__(
        self, cell: Cell, folder: Path, device: str, test_batches: int = TEST_BATCHES
    ) -> None:
        self.cell = cell
        self.test_batches = test_batches
        self.device = torch.device(device)
        self.train = read_bytes(folder, "train", self.device)
        self.valid = read_bytes(folder, "valid", self.device)
        torch.manual_seed(10 * cell.seed)
        make = LocalWorkers if cell.method in LOCAL else CommonSteps
        self.job: Job = make(cell, self.device)
        self.generator = torch.Generator().manual_seed(10 * cell.seed + 1)
        self.step = 0
        self.curve: list[float] = []
        self.train_curve: list[float] = []
        """Of bytes that were trained on, with as many batches."""
        self.seconds = 0.0
        self.dense_bytes = 0
        """Sent when the dense start ended."""

    def rate(self) -> float:
        cell, step = self.cell, self.step
        cosine = 0.5 * (1 + math.cos(math.pi * step / cell.steps))
        warm = min(1.0, (step + 1) / min(WARM_UP, max(1, cell.steps // 10)))
        return cell.lr * warm * (LAST_RATE + (1 - LAST_RATE) * cosine)

    def run(self, until: float, stop: int | None = None) -> bool:
        """Train until the end, until the clock says so, or before the step `stop`; whether it is done."""
        began = time.monotonic()
        last = self.cell.steps if stop is None else stop
        while self.step < last and time.monotonic() < until:
            batches = [
                draw_batch(self.train, self.cell, self.generator) for _ in range(self.cell.workers)
            ]
            self.job.step(batches, self.rate())
            self.step += 1
            if self.step == self.half:
                self.dense_bytes = self.job.sent_bytes()
            if self.step % max(1, self.cell.steps // TESTS) == 0:
                self.curve.append(self.test(self.valid))
                self.train_curve.append(self.test(self.train))
        self.seconds += time.monotonic() - began
        return self.step >= self.cell.steps

    @property
    def half(self) -> int:
        """From here on bytes are counted: every dense start has ended."""
        return self.cell.steps // 2

    @torch.no_grad()
    def test(self, text: Tensor) -> float:
        """Nats per byte of a text, the same batches always."""
        generator = torch.Generator().manual_seed(7)
        model, cell = self.job.model, self.cell
        losses = [model(*draw_batch(text, cell, generator)) for _ in range(self.test_batches)]
        return float(torch.stack(losses).mean())

    def row(self) -> dict[str, Any]:
        sent = self.job.sent_bytes() - self.dense_bytes
        parameters = sum(p.numel() for p in self.job.model.parameters())
        world = self.cell.workers
        counted = self.cell.steps - self.half
        return {
            **asdict(self.cell),
            "key": self.cell.key,
            "parameters": parameters,
            "valid_loss": self.curve[-1],
            "best_valid_loss": min(self.curve),
            "train_loss": self.train_curve[-1],
            "curve": [round(loss, 4) for loss in self.curve],
            "passes": self.cell.steps
            * world
            * self.cell.batch
            * self.cell.context
            / len(self.train),
            # As many bits per parameter and step as an all-reduce with the same traffic would have.
            "bits": sent * 8 / counted / parameters / (2 * (world - 1) / world),
            "memory_bytes": self.job.memory_bytes(),
            "seconds": round(self.seconds, 1),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }

    def save(self, path: Path) -> None:
        state = {
            "job": self.job.state_dict(),
            "generator": self.generator.get_state(),
            "numbers": (self.step, self.curve, self.train_curve, self.seconds),
            "sent": self.job.sent_bytes() - self.dense_bytes,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.job.load_state_dict(state["job"])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.curve, self.train_curve, self.seconds = state["numbers"]
        if self.step >= self.half:
            self.dense_bytes = -state["sent"]
