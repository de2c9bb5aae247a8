"""A job whose gradients are given: what every switch has to conserve is then known at every step.

The loss is linear in the parameters, so that gradients do not depend on what has arrived. Under SGD with momentum m the
displacement that all gradients so far will have caused in the end is sum(g) / (1 - m). At any time it is made of three parts:

    what the parameters have moved + m / (1 - m) x momentum + what is held back

where what is held back counts 1 / (1 - m) times if momentum is still to be applied to it, and once if it was applied before.
Adam's momentum is a mean, (1 - m) times that of SGD: its own sum of what was applied is compared, before any division.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.auto.council import Council

MOMENTUM = 0.8
LR = 0.5
SHAPES = ((48, 40), (40, 56), (9,), (64, 32))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        parts = [(p * g).sum() for p, g in zip(self.layers, gradients, strict=True)]
        return torch.stack(parts).sum()


def draw(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.detach().double().flatten() for one in tensors])


def make_learned(optimizer: torch.optim.Optimizer, steps: int = 1000) -> None:
    """As if AdamW had taken so many steps: before that Auto leaves its work with it."""
    for parameter in optimizer.param_groups[0]["params"]:
        state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.ones_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **state}


class LinearJob:
    """One rank of it; `jitter_s` makes every third step of odd ranks late."""

    def __init__(
        self,
        rank: int,
        method: tw.Method,
        *,
        adam: bool = False,
        jitter_s: float = 0.0,
        bucket_mb: float = 0.01,
    ) -> None:
        self.rank, self.jitter_s = rank, jitter_s
        self.model = Linear()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.ddp.parameters(), lr=1e-3, betas=(MOMENTUM, 0.95))
            if adam
            else torch.optim.SGD(self.ddp.parameters(), lr=LR, momentum=MOMENTUM)
        )
        if adam:
            make_learned(self.optimizer)
        self.handle = tw.attach(self.ddp, method, optimizer=self.optimizer)
        self.taken = 0
        self.adam = adam
        self._applied = torch.zeros(sum(p.numel() for p in self.model.parameters())).double()

    @property
    def pilot(self) -> Any:
        assert self.handle.steering.pilot is not None
        return self.handle.steering.pilot

    def step(self) -> None:
        if self.rank % 2 and self.taken % 3 == 2:
            time.sleep(self.jitter_s)
        self.optimizer.zero_grad()
        self.ddp(draw(self.rank, self.taken)).backward()
        ours = [self._held(index, "second_moment") is not None for index in range(len(SHAPES))]
        self.optimizer.step()
        self.taken += 1
        if self.adam:
            # Adam applies its momentum, and whoever has taken its step over what arrived.
            layers = enumerate(zip(ours, self.model.layers, strict=True))
            parts = [p.grad if own else self._momentum_of(index, p) for index, (own, p) in layers]
            self._applied += flatten(parts)

    def weights(self) -> Tensor:
        return flatten(list(self.model.layers))

    def displacement(self) -> Tensor:
        """This rank's part of what the gradients so far will have moved; the mean over ranks is what they should."""
        held = flatten([self.handle.residual(f"layers.{i}") for i in range(len(SHAPES))])
        coming = MOMENTUM / (1 - MOMENTUM) * self._momentum()
        if self.adam:
            return self._applied + coming + held
        owned = self.handle.steering.takeover is not None
        return -self.weights() / LR + coming + (held if owned else held / (1 - MOMENTUM))

    def _momentum(self) -> Tensor:
        return flatten([self._momentum_of(index, p) for index, p in enumerate(self.model.layers)])

    def _momentum_of(self, index: int, parameter: Tensor) -> Tensor:
        """The optimizer's, or this rank's while the handle has it."""
        state = self.optimizer.state.get(parameter, {})
        own = state.get("momentum_buffer", state.get("exp_avg"))
        known = (self._held(index, "momentum"), own, torch.zeros_like(parameter))
        return next(one for one in known if one is not None)

    def _held(self, index: int, store: str) -> Tensor | None:
        return self.handle.reducer.assignments.held(f"layers.{index}", store)

    def resume(self, other: LinearJob) -> None:
        """Go on where another job of this rank is, from what it saves."""
        self.model.load_state_dict(other.model.state_dict())
        # As from a file: torch's optimizers would share their buffers.
        optimizer, handle = deepcopy((other.optimizer.state_dict(), other.handle.state_dict()))
        self.optimizer.load_state_dict(optimizer)
        self.handle.load_state_dict(handle)
        self.taken, self._applied = other.taken, other._applied.clone()


def expected(world: int, steps: int, *, adam: bool = False) -> Tensor:
    """What the mean gradients of so many steps will have moved."""
    total = torch.stack([flatten(draw(r, s)) for r in range(world) for s in range(steps)]).sum(0)
    return total / world if adam else total / (world * (1 - MOMENTUM))


class Scripted(Council):
    """A council in which figures and decisions are what the test says, not what a busy machine makes of them."""

    def __init__(self, council: Council, script: Sequence[tuple[Sequence[str], str]]) -> None:
        """`script` has, for every planning, the labels that are tried and the one that is kept.

        "a|b" stands for a mixture of two that take turns.
        """
        super().__init__(council.groups[-1], council.place, council.groups[:-1])
        self._script = list(script)
        self._trials: Sequence[str] = ()
        self._kept = ""
        self.slow_start = False
        """Whether the first dense step counts as a hundred times too slow."""
        self.slowdown = 1.0

    def largest(self, values: Sequence[float]) -> list[float]:
        found = [self.slowdown * one for one in super().largest(values)]
        if len(found) == 2:
            return [100.0, 1.0] if self.slow_start else [0.0, 1.0]
        return [1.0 * self.slowdown] if len(found) == 1 and found[0] > 0 else found

    def decide(self, make: Callable[[], str]) -> str:
        return super().decide(lambda: self._overrule(make()))

    def _overrule(self, text: str) -> str:
        said = json.loads(text)
        if isinstance(said, list):
            return json.dumps(mix(self._kept, len(said)))
        if "finalists" in said:
            self._trials, self._kept = self._script.pop(0)
            units = len((said["finalists"] or [said["labels"]])[0])
            said["finalists"] = [mix(label, units) for label in self._trials]
            return json.dumps(said)
        return text


def mix(label: str, units: int) -> list[str]:
    parts = label.split("|")
    return [parts[index % len(parts)] for index in range(units)]
