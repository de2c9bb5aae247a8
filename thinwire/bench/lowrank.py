"""Communication time of a model's gradients: dense, as left factors P, as right factors Q; tensor by tensor and fused.

What ACP-SGD is built on: factors are so small that their latency counts, so they have to travel together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.layout import ParameterInfo, contiguous_strides, kind_from_shape
from thinwire.lowrank import matrices_of
from thinwire.tools.clock import wait_for
from thinwire.tools.settings.names import check_name
from thinwire.validate import check_positive_int

Shape = tuple[int, ...]
KINDS = ("dense", "P", "Q")


@dataclass(frozen=True, kw_only=True)
class LowRankRow:
    """All-reducing everything a model sends in one step of one kind; medians over the repeats, the slowest rank's."""

    model: str
    workers: int
    rank: int
    sends: str
    """"dense", "P" or "Q"; vectors travel with all of them, as they are."""
    tensors: int
    bytes: int
    per_tensor_ms: float
    fused_ms: float


def measure_models(
    device: torch.device, wide: dict[str, int], repeats: int
) -> list[dict[str, Any]]:
    """The rows of several models, as plain values, each with factors so wide; on every rank of the default group."""
    group = dist.group.WORLD
    assert group is not None
    return [
        asdict(row)
        for model, rank in wide.items()
        for row in measure_lowrank(model, rank=rank, group=group, device=device, repeats=repeats)
    ]


def measure_lowrank(
    model: str,
    *,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int = 5,
    shapes: Sequence[Shape] | None = None,
) -> list[LowRankRow]:
    """The rows of one model, on every rank of `group`; `shapes` instead of a model known by name.

    1. Make zeros of the size of every tensor that is sent, side by side in one buffer.
    2. All-reduce them one after the other, issued at once and awaited together; then as one buffer.
    3. Agree on the slowest rank's time of each repeat, and take the median.
    """
    check_positive_int("rank", rank)
    check_positive_int("repeats", repeats)
    if shapes is None:
        shapes = shapes_of(model)
    rows = []
    for kind in KINDS:
        sizes = sent_sizes(shapes, rank, kind)
        whole = torch.zeros(sum(sizes), device=device)
        tensors = whole.split(sizes)
        apart = time_collectives(tensors, group, device, repeats)
        fused = time_collectives([whole], group, device, repeats)
        rows.append(
            LowRankRow(
                model=model,
                workers=dist.get_world_size(group),
                rank=rank,
                sends=kind,
                tensors=len(tensors),
                bytes=whole.nbytes,
                per_tensor_ms=1e3 * apart,
                fused_ms=1e3 * fused,
            )
        )
    return rows


def time_collectives(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, repeats: int
) -> float:
    """Median seconds, over ranks the slowest."""
    seconds = torch.zeros(repeats + 1)
    for repeat in range(repeats + 1):
        dist.barrier(group)
        began = time.perf_counter()
        issued = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in issued:
            assert work is not None
            work.wait()
        wait_for(device)
        seconds[repeat] = time.perf_counter() - began
    slowest = seconds.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    # The first one opens connections.
    return statistics.median(slowest[1:].tolist())


def sent_sizes(shapes: Sequence[Shape], rank: int, kind: str) -> list[int]:
    """Elements of every tensor that travels; each tensor of two or more dimensions as its factor."""
    sizes = []
    for shape in shapes:
        info = ParameterInfo(
            "w", shape, contiguous_strides(shape), torch.float32, kind_from_shape(len(shape))
        )
        matrices = matrices_of(info.slot(0)) if kind != "dense" else None
        if matrices is None:
            sizes.append(math.prod(shape))
        else:
            sizes.append(matrices.count * matrices.side(kind.lower()) * matrices.rank(rank))
    return sizes


def shapes_of(model: str) -> list[Shape]:
    check_name("model", model, SHAPES)
    return SHAPES[model]()


def resnet_shapes(blocks: Sequence[int]) -> list[Shape]:
    """torchvision's bottleneck ResNets for 1000 classes."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            layers: list[Shape] = [
                (width, width_in, 1, 1),
                (width, width, 3, 3),
                (4 * width, width, 1, 1),
            ]
            if block == 0:
                layers.append((4 * width, width_in, 1, 1))
            for layer in layers:
                shapes += [layer, (layer[0],), (layer[0],)]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def bert_shapes(layers: int, hidden: int, vocabulary: int = 30528) -> list[Shape]:
    """BERT for pre-training, its vocabulary padded to a multiple of 8, the decoder tied to the embedding."""
    vector: Shape = (hidden,)
    shapes: list[Shape] = [(vocabulary, hidden), (512, hidden), (2, hidden), vector, vector]
    for _ in range(layers):
        shapes += [(hidden, hidden), vector] * 4
        shapes += [vector, vector]
        shapes += [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), vector]
        shapes += [vector, vector]
    pooler_and_head: list[Shape] = [(hidden, hidden), vector, (hidden, hidden), vector]
    return [*shapes, *pooler_and_head, vector, vector, (vocabulary,), (2, hidden), (2,)]


SHAPES: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": lambda: resnet_shapes((3, 4, 6, 3)),
    "resnet152": lambda: resnet_shapes((3, 8, 36, 3)),
    "bert-base": lambda: bert_shapes(12, 768),
    "bert-large": lambda: bert_shapes(24, 1024),
}
"""The models of the ACP-SGD paper."""

PAPER_RANKS = {"resnet50": 4, "resnet152": 4, "bert-base": 32, "bert-large": 32}
