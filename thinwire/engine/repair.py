"""Repair: parameters, gradients and what goes with them become those of one rank again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.engine.drivers import Driver
from thinwire.exchange.requests import Broadcast, Program


class Follower(Protocol):
    """Keeps tensors that are the same on all ranks, and change with the parameters."""

    def shared_state(self) -> dict[str, Tensor]:
        """Copies of them by name."""

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace them."""


def repair(
    driver: Driver,
    parameters: Mapping[str, Tensor],
    optimizer: Optimizer,
    followers: Sequence[Follower],
    *,
    source: int,
) -> None:
    """Copy from the rank `source`, on every rank at the same point:

    1. the parameters;
    2. their gradients, which the next step applies;
    3. the optimizer's state;
    4. what the `followers` keep alike on all ranks.
    """
    shared = [one.shared_state() for one in followers]
    others = {
        f"{number} {name}": tensor
        for number, state in enumerate(shared)
        for name, tensor in state.items()
    }
    device = next(iter(parameters.values())).device
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = [
        (f"{names.get(id(parameter), number)}/{key}", state, key)
        for number, (parameter, state) in enumerate(optimizer.state.items())
        for key in sorted(state)
    ]
    found = {f"optimizer state {name}": _kind(state[key]) for name, state, key in states}
    found |= {f"state {name}": _kind(tensor) for name, tensor in others.items()}
    driver.agree(found)
    tensors = [one.detach() for one in parameters.values()]
    tensors += [one.grad for one in parameters.values() if one.grad is not None]
    tensors += [state[key] for _, state, key in states if isinstance(state[key], Tensor)]
    tensors += others.values()
    driver.run(_copy_from(source, tensors, device), "repair")
    numbers = [(state, key) for _, state, key in states if isinstance(state[key], int | float)]
    held = torch.tensor([float(state[key]) for state, key in numbers], dtype=torch.float64)
    driver.run(_copy_from(source, [held], device), "repair")
    for (state, key), value in zip(numbers, held.tolist(), strict=True):
        state[key] = type(state[key])(value)
    for one, mended in zip(followers, shared, strict=True):
        one.load_shared_state(mended)


@torch.no_grad()
def _copy_from(source: int, tensors: Sequence[Tensor], device: torch.device) -> Program[None]:
    """One after the other: a copy of a whole optimizer would not fit everywhere."""
    for tensor in tensors:
        if tensor.numel():
            # A broadcast needs contiguous memory on the device of the group.
            staged = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
            (sent,) = yield (Broadcast(staged, "repair", source=source),)
            tensor.copy_(sent)


def _kind(value: Any) -> str:
    return (
        f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    )
