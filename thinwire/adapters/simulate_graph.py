"""Graphs: forward and backward of one micro-batch, captured once per shape of its inputs and replayed.

On a GPU a small model is bound by the launches of its kernels, and simulated workers launch the same ones over and over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Passes before capturing, in which libraries choose algorithms and allocate what they keep."""
MOST = 16
"""Graphs of one simulation; each holds its activations for good."""

Compute = Callable[..., Any]
"""From inputs (tensors, or trees of them) to the loss, or to a tuple that begins with the loss."""


def loss_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def detached(result: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Inside, autocast converts a weight whenever it is used, also under an autocast of the caller's.

    A graph that was captured with a copy from before would go on with that weight for ever.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def recurrent_dropout(model: nn.Module) -> str | None:
    """The first layer that leaves dropout to cuDNN's recurrent kernels, if there is one.

    They draw from a buffer on the device that torch frees and makes anew whenever a generator was seeded. A graph would go on
    with the freed one, and draw what no worker's generator says.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout > 0:
            return name or type(module).__name__
    return None


def run_pass(compute: Compute, arguments: Sequence[Any]) -> Any:
    """Forward and backward of one micro-batch; its result, detached."""
    result = compute(*arguments)
    loss_of(result).backward()
    return detached(result)


@dataclass(eq=False)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any
    gradients: list[Tensor | None]


class Graphs:
    """Captures and replays; gives up with one sentence where that cannot work."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._captured: dict[Hashable, Captured] = {}
        self._device = self._parameters[0].device
        self.enabled = True
        if self._device.type != "cuda":
            self._give_up(f"the model is on {self._device}, not on a CUDA device")
        elif layer := recurrent_dropout(model):
            self._give_up(
                f"{layer} has dropout between its layers, which no graph can follow; use nn.Dropout between single layers"
            )

    def key(self, compute: Compute, inputs: Sequence[Any]) -> Hashable:
        leaves, tree = tree_flatten(tuple(inputs))
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        )
        kind = self._device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return compute, str(tree), shapes, self._model.training, cast

    def has(self, key: Hashable) -> bool:
        return key in self._captured

    def capture(self, key: Hashable, compute: Compute, inputs: Sequence[Any]) -> bool:
        """Run and record one pass; whether that worked.

        The passes before it count for nothing: the caller puts generators and buffers back afterwards.
        """
        if len(self._captured) >= MOST:
            self._give_up(
                f"{MOST} graphs were captured already; hand over the same function and few shapes of inputs"
            )
            return False
        leaves, tree = tree_flatten(tuple(inputs))
        elsewhere = {t.device for t in leaves if isinstance(t, Tensor)} - {self._device}
        if elsewhere:
            self._give_up(f"an input is on {elsewhere.pop()}, the model on {self._device}")
            return False
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments = tree_unflatten(static, tree)
        try:
            with fresh_casts():
                self._warm_up(compute, arguments)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = run_pass(compute, arguments)
        except Exception as error:
            self._clear()
            # A capture that broke off leaves torch's generator in the belief that it goes on.
            own = torch.cuda.default_generators[self._device.index]
            own.graphsafe_set_state(torch.Generator(self._device))
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._give_up(first_line)
            return False
        gradients = [parameter.grad for parameter in self._parameters]
        tensors = [leaf for leaf in static if isinstance(leaf, Tensor)]
        self._captured[key] = Captured(graph, tensors, result, gradients)
        self._clear()
        return True

    def replay(self, key: Hashable, inputs: Sequence[Any]) -> Any:
        """One pass with other inputs; gradients are added to `p.grad`. The result is a copy."""
        captured = self._captured[key]
        leaves = [leaf for leaf in tree_flatten(tuple(inputs))[0] if isinstance(leaf, Tensor)]
        if leaves:
            torch._foreach_copy_(captured.inputs, leaves)
        captured.graph.replay()
        so_far: list[Tensor] = []
        more: list[Tensor] = []
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                so_far.append(parameter.grad)
                more.append(gradient)
        if more:
            torch._foreach_add_(so_far, more)
        return tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, captured.result
        )

    def _warm_up(self, compute: Compute, arguments: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run_pass(compute, arguments)
                self._clear()
        torch.cuda.current_stream().wait_stream(stream)

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _give_up(self, reason: str) -> None:
        self.enabled = False
        logger.warning(
            "graph=True does not work here, so every pass runs kernel by kernel: %s", reason
        )
