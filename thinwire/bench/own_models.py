"""Your own model in a benchmark: what `module:function` may return, and how that becomes a workload.

The function is called as `function(device, batch)` and returns one of

    Workload(model, draw, loss)    everything said
    (model, example)               a torch.nn.Module and one batch: a tensor, or a tuple or dict of the arguments of forward

With an example, the loss is the model's own where its output has one (`output.loss`, or a single number), and else the mean
square of what comes out: a step takes as long. Every rank draws values like those of the example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.tools.settings.names import import_own


@dataclass(frozen=True)
class Workload:
    """A model, and how a batch for it is drawn and judged."""

    model: nn.Module
    draw: Callable[[], Any]
    """One batch from torch's global generator, on its default device."""
    loss: Callable[[nn.Module, Any], Tensor]
    """The loss of a batch under the model as DDP wraps it."""


def import_function(name: str) -> Callable[[torch.device, int], Any]:
    """The user's function by 'module:function'."""
    function = import_own("model", name)
    if not callable(function) or isinstance(function, nn.Module):
        module, _, attribute = name.partition(":")
        raise UsageError(f"model is {name!r}, but {module} has no function {attribute}")
    return function


def to_workload(name: str, made: Any) -> Workload:
    """What a user's function returned as a workload; UsageError if it is none."""
    if isinstance(made, Workload):
        return made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        model, example = made
        if find_tensors(example):
            return Workload(model, lambda: draw_like(example), own_loss)
    without = " without a batch" if isinstance(made, nn.Module) else ""
    raise UsageError(
        f"model is {name!r}, but it returned a {type(made).__name__}{without}; it must return (model, batch), a "
        "torch.nn.Module and an example of what it takes, or a thinwire.bench.models.Workload"
    )


def find_tensors(example: Any) -> list[Tensor]:
    """The tensors of a batch."""
    if isinstance(example, Tensor):
        return [example]
    if isinstance(example, Mapping):
        return [value for value in example.values() if isinstance(value, Tensor)]
    if isinstance(example, list | tuple):
        return [value for value in example if isinstance(value, Tensor)]
    return []


def draw_like(example: Any) -> Any:
    """Another batch of the same form: numbers of the same mean and spread; whole numbers are shuffled, truth values stay."""
    if isinstance(example, Tensor):
        return draw_tensor(example)
    if isinstance(example, Mapping):
        return {name: draw_like(value) for name, value in example.items()}
    if isinstance(example, list | tuple):
        return tuple(draw_like(value) for value in example)
    return example


def draw_tensor(like: Tensor) -> Tensor:
    if like.dtype == torch.bool or like.numel() < 2:
        return like
    if not like.is_floating_point():
        order = torch.randperm(like.numel(), device=like.device)
        return like.flatten()[order].view_as(like)
    spread, mean = torch.std_mean(like.float())
    return (mean + spread * torch.randn(like.shape, device=like.device)).to(like.dtype)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that was given without one."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    while not isinstance(output, Tensor):
        # A tuple, or one of transformers' outputs: what comes first is what it is for.
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output if output.dim() == 0 else output.float().square().mean()
