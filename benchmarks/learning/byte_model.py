"""A byte-level GPT, and the losses of many workers' copies of it in one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.byte_cells import Cell


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
