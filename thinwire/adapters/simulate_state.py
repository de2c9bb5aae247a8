"""What a worker has to itself beside its gradient: random generators, and the model's buffers during a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

GeneratorState = dict[str, Tensor]
"""By kind of device: "cpu", and "cuda" if the model is there."""


class RandomStates:
    """Torch's global generators of every worker, kept while another worker, or the caller, uses them.

    Worker r starts as a process does that called `torch.manual_seed(torch.initial_seed() + r)`.
    """

    def __init__(self, workers: int, device: torch.device) -> None:
        self._device = device
        first = torch.initial_seed()
        self.states = [self._seeded(first + rank) for rank in range(workers)]

    def _seeded(self, seed: int) -> GeneratorState:
        devices = [torch.device("cpu"), *([self._device] if self._device.type == "cuda" else [])]
        seed %= 2**63
        return {d.type: torch.Generator(d).manual_seed(seed).get_state() for d in devices}

    def read(self) -> GeneratorState:
        """What the global generators hold now."""
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def write(self, state: GeneratorState) -> None:
        torch.set_rng_state(state["cpu"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)

    def state_dict(self) -> dict[str, Any]:
        return {f"rank{rank}": dict(state) for rank, state in enumerate(self.states)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Another number of workers leaves them as they are."""
        if len(saved) != len(self.states):
            return
        for rank in range(len(self.states)):
            self.states[rank] = {kind: t.clone().cpu() for kind, t in saved[f"rank{rank}"].items()}


Shelf = list[list[Tensor]]
"""A copy of all buffers, one list per dtype: only alike ones are copied by one kernel."""


class BufferStates:
    """The model's buffers, such as running statistics of batch norms, as each worker has them during a step.

    Under DDP every worker starts a step from worker 0's buffers. So do these; what the others write there is theirs
    until the step ends, and then dropped.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._buffers: Shelf = list(by_dtype.values())
        self._now = 0
        """Whose buffers are in the model."""
        self._start: Shelf | None = None
        self._begun: set[int] = set()
        """Workers that have computed in this step."""
        self._shelves: dict[int, Shelf] = {}

    def load(self, rank: int) -> None:
        """Put a worker's buffers into the model."""
        if not self._begun:
            self._start = self.copy(into=self._start)
        assert self._start is not None
        if rank != self._now:
            self._shelves[self._now] = self.copy(into=self._shelves.get(self._now))
            self.put(self._shelves[rank] if rank in self._begun else self._start)
            self._now = rank
        self._begun.add(rank)

    def end_step(self) -> None:
        """Worker 0's buffers are the model's."""
        if self._now != 0:
            self.put(self._shelves[0])
            self._now = 0
        self._begun.clear()

    def copy(self, into: Shelf | None = None) -> Shelf:
        shelf = into or [[torch.empty_like(buffer) for buffer in one] for one in self._buffers]
        self._copy(self._buffers, shelf)
        return shelf

    def put(self, shelf: Shelf) -> None:
        self._copy(shelf, self._buffers)

    @torch.no_grad()
    def _copy(self, source: Shelf, target: Shelf) -> None:
        for values, places in zip(source, target, strict=True):
            torch._foreach_copy_(places, values)

    def nbytes(self) -> int:
        shelves = [*self._shelves.values(), *([self._start] if self._start else [])]
        return sum(t.nbytes for shelf in shelves for one in shelf for t in one)
