"""Small sharded models for tests of the FSDP adapter: replicas x shards on gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

VOCABULARY, WIDTH, LENGTH = 37, 32, 6


class Block(nn.Module):
    """Odd sizes: shards of unequal size, and of 3 rows a shard of none with 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 51)
        self.gate = nn.Linear(51, 3)
        self.down = nn.Linear(51, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.up(self.norm(x)))
        return x + self.down(inner) * self.gate(inner).sigmoid().mean(-1, keepdim=True)


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def make_mesh(replicas: int, shards: int, tensor: int = 0) -> DeviceMesh:
    """Made once per process: a mesh has groups."""
    names = ("replicate", "shard", "tensor")
    sizes = (replicas, shards, tensor) if tensor else (replicas, shards)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])


def place_columns(parameter: nn.Parameter) -> Shard | None:
    """Along dimension 1 where that can be cut evenly."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] == WIDTH else None


def make_model(
    mesh: DeviceMesh,
    *,
    change: Callable[[TinyModel], Any] = lambda model: None,
    apply: Callable[..., Any] = fully_shard,
    **options: Any,
) -> Any:
    """The model with every block and the rest as a unit; `change` is done to it first."""
    torch.manual_seed(0)
    model = TinyModel()
    change(model)
    for block in model.blocks:
        apply(block, mesh=mesh, **options)
    apply(model, mesh=mesh, **options)
    assert isinstance(model, FSDPModule)
    return model


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(VOCABULARY, (4, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train(
    model: Any,
    steps: int | Sequence[int] = 3,
    *,
    accumulation: str = "one backward",
    optimizer: torch.optim.Optimizer | None = None,
    data_rank: int | None = None,
) -> torch.optim.Optimizer:
    """Some steps; every rank has data of its own."""
    rank = dist.get_rank() if data_rank is None else data_rank
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    passes = 1 if accumulation == "one backward" else 2
    for step in range(steps) if isinstance(steps, int) else steps:
        for micro in range(passes):
            last = micro == passes - 1
            if accumulation == "no sync":
                model.set_requires_gradient_sync(last)
            if accumulation == "no all-reduce":
                model.set_requires_all_reduce(last)
            loss_of(model, batch(rank, step, micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def poison_token(model: Any, token: int, ids: torch.Tensor) -> None:
    """The gradient of one row of the embedding becomes infinite in the next backward."""

    def watch(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda g: torch.where((ids == token)[..., None], torch.inf, g))
        remover.remove()

    remover = model.tokens.register_forward_hook(watch)


ACCUMULATIONS = ["one backward", "every backward", "no sync", "no all-reduce"]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> Tensor:
    """What this rank has of all parameters, in one vector."""
    return torch.cat([local(p.detach()).flatten().double() for p in model.parameters()])


def are_replicas_equal(model: nn.Module, replicas: dist.ProcessGroup) -> bool:
    """Whether the ranks that hold the same shards hold the same bits."""
    mine = weights(model)
    others = [torch.empty_like(mine) for _ in range(replicas.size())]
    dist.all_gather(others, mine, group=replicas)
    return all(torch.equal(mine, other) for other in others)
