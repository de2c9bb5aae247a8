"""A byte-level GPT on text files, trained by simulated workers: one cell of the studies of Adam and of local steps.

Everything that differs between cells is in `Cell`; data, batches and the start of the weights depend on the seed alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
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
TEST_WINDOWS = 320
TEST_BATCH = 80
BUCKET_MB = 512
"""All of a model: nothing overlaps with anything here, and fewer buckets are fewer launches."""


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
    """Products and attention in bf16; weights and what the blocks add up in fp32."""

    @property
    def key(self) -> str:
        size = f"{self.layers}x{self.width}x{self.batch}-{self.steps}"
        return f"{self.method}-{size}-lr{self.lr:g}-start{self.start}-seed{self.seed}"


REFRESH = tw.memory.Refresh(every=50)
PLAIN: dict[str, tw.Method] = {
    "int8": tw.Quantized(bits=8),
    "int4": tw.Quantized(bits=4),
    "int8-stochastic": tw.Quantized(bits=8, rounding="stochastic"),
    "int4-stochastic": tw.Quantized(bits=4, rounding="stochastic"),
    "int4-sums16": tw.Quantized(bits=4, sum_bits=16),
    "int8-no-memory": tw.Quantized(bits=8, memory=tw.memory.NoMemory()),
    "int4-no-memory": tw.Quantized(bits=4, memory=tw.memory.NoMemory()),
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
    """The weights of one block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.norm2 = nn.RMSNorm(width)
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.grow = nn.Linear(width, 4 * width, bias=False)
        self.shrink = nn.Linear(4 * width, width, bias=False)


class ByteGPT(nn.Module):
    """Bytes [B, T] -> the mean loss of the next ones, in nats. The decoder is the embedding."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.embedding = nn.Embedding(256, cell.width)
        self.positions = nn.Parameter(torch.empty(cell.context, cell.width))
        self.blocks = nn.ModuleList(Block(cell.width) for _ in range(cell.layers))
        self.norm = nn.RMSNorm(cell.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_stream = name.endswith(("output.weight", "shrink.weight"))
                shrunk = 1 / math.sqrt(2 * cell.layers) if into_stream else 1.0
                nn.init.normal_(parameter, std=0.02 * shrunk)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        own = {name: parameter[None] for name, parameter in self.named_parameters()}
        return compute_losses(own, self.cell, given[None], wanted[None])[0]


class WorkersLinear(torch.autograd.Function):
    """x [W, n, in], weight [W, out, in] -> [W, n, out], in the precision of x.

    The weight may be one that all workers share, expanded; its gradient is each worker's own. It comes as the weight is laid
    out and in its precision: autograd's own would have to be turned and widened, a pass over all workers' weights each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        shared = weight.stride(0) == 0
        narrow = weight[:1].to(x.dtype).expand_as(weight) if shared else weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.dtype = weight.dtype
        return torch.bmm(x, narrow.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        turned = gradient.transpose(1, 2)
        if x.is_cuda and x.dtype != ctx.dtype:
            own = torch.bmm(turned, x, out_dtype=ctx.dtype)
        else:
            own = torch.bmm(turned, x).to(ctx.dtype)
        return torch.bmm(gradient, weight), own


def compute_losses(
    weights: Mapping[str, Tensor], cell: Cell, given: Tensor, wanted: Tensor
) -> Tensor:
    """Bytes [W, B, T] -> the loss of each of W workers. Every weight has a leading dimension for the workers.

    All workers go through the model together: one by one, a small model is bound by its launches.
    """
    workers, batch, length = given.shape
    width, heads = cell.width, max(1, cell.width // 64)
    dtype = torch.bfloat16 if cell.narrow else torch.float32

    def linear(x: Tensor, name: str) -> Tensor:
        made: Tensor = WorkersLinear.apply(x, weights[f"{name}.weight"])
        return made

    def norm(x: Tensor, name: str) -> Tensor:
        return (functional.rms_norm(x, (width,)) * weights[f"{name}.weight"][:, None]).to(dtype)

    # A lookup as a product: it has the leading dimension, too, and its gradient waits for nobody.
    values = torch.arange(256, device=given.device)
    chosen = (given.flatten(1)[..., None] == values).to(weights["embedding.weight"].dtype)
    embedded = torch.bmm(chosen, weights["embedding.weight"])
    positions = weights["positions"][:, None].expand(-1, batch, -1, -1)
    x = embedded + positions.flatten(1, 2)
    for index in range(cell.layers):
        block = f"blocks.{index}"
        inputs = linear(norm(x, f"{block}.norm1"), f"{block}.inputs")
        split = inputs.view(workers * batch, length, 3, heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(x.shape), f"{block}.output")
        grown = functional.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.grow"))
        x = x + linear(grown, f"{block}.shrink")
    logits = linear(norm(x, "norm"), "embedding")
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), wanted.flatten(), reduction="none"
    )
    return losses.view(workers, -1).mean(1)


def read_bytes(folder: Path, part: str, device: torch.device) -> Tensor:
    """All of `folder`'s wikitext file of that part (train, valid), below any folder."""
    found = sorted(
        path for path in folder.rglob(f"*{part}*") if path.is_file() and "wiki" in str(path).lower()
    )
    if not found:
        raise FileNotFoundError(f"there is no wikitext file named *{part}* below {folder}")
    content = bytearray(found[0].read_bytes())
    return torch.frombuffer(content, dtype=torch.uint8).long().to(device)


def draw_windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """[count, context + 1] bytes from random places."""
    begins = torch.randint(len(text) - context - 1, (count,), generator=generator)
    return text[begins.to(text.device)[:, None] + torch.arange(context + 1, device=text.device)]


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


class Training:
    """One cell at work; it can be put aside and taken up again."""

    def __init__(
        self, cell: Cell, folder: Path, device: str, test_windows: int = TEST_WINDOWS
    ) -> None:
        self.cell = cell
        self.test_windows = test_windows
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
            workers, batch, context = self.cell.workers, self.cell.batch, self.cell.context
            windows = draw_windows(self.train, workers * batch, context, self.generator)
            self.job.step(windows.view(workers, batch, -1), self.rate())
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
        """Nats per byte of a text, the same windows always."""
        generator = torch.Generator().manual_seed(7)
        windows = draw_windows(text, self.test_windows, self.cell.context, generator)
        parts = windows.split(TEST_BATCH)
        losses = [self.job.model(part[:, :-1], part[:, 1:]) * len(part) for part in parts]
        return float(torch.stack(losses).sum()) / self.test_windows

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
