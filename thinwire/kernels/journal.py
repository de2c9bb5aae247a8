"""Journal: what the current step has changed, and what it was before, so that a step that is skipped leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.restore import restore_by_kernel
from thinwire.kernels.cuda.toolchain import has_kernels

Pair = tuple[Tensor, Tensor]
"""A tensor, and what it has to be again: contiguous, of one size and dtype, on one device."""
Place = tuple[int, int]
"""Address and bytes."""


class Journal:
    """Whoever changes something that outlives the step notes it here. A bad verdict makes it what it was."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []
        self._actions: list[Callable[[], None]] = []
        self._origins: dict[Place, Tensor] = {}
        """Of what earlier backwards of this step have changed: what it was before the first, by the place where it is now."""

    def note(self, now: Tensor, before: Tensor) -> None:
        """`now` is to hold the bits of `before` if the step is bad. Both stay where they are until the step ends."""
        if self._origins and now.numel():
            # An earlier backward may have written there, or here.
            of_now = self._origins.get(place_of(now), before)
            before = self._origins.get(place_of(before), of_now)
        self._pairs.append((now, before))

    def note_action(self, undo: Callable[[], None]) -> None:
        """`undo` is to be called if the step is bad. The host waits for the verdict, so it is for those who wait anyway."""
        self._actions.append(undo)

    def restore(self, bad: Tensor) -> None:
        """Apply a verdict (bool []). Again with a good step that is discarded after all."""
        if self._pairs:
            restore_all(self._pairs, bad)
        if self._actions and bool(bad):
            actions, self._actions = self._actions, []
            for undo in reversed(actions):
                undo()

    def extend(self) -> None:
        """The step goes on with another backward, which uses the same memory again. A bad verdict will take back both."""
        # Of what several backwards have changed one copy is enough.
        changed = {place_of(now): (now, before) for now, before in self._pairs if now.numel()}
        self._origins = {
            place: self._origins[place] if place in self._origins else before.clone()
            for place, (_, before) in changed.items()
        }
        self._pairs = [(now, self._origins[place]) for place, (now, _) in changed.items()]

    def clear(self) -> None:
        """The step has ended: nothing of it can be taken back any more."""
        self._pairs.clear()
        self._actions.clear()
        self._origins.clear()


def place_of(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.nbytes


def restore_all(pairs: Sequence[Pair], bad: Tensor) -> None:
    """If `bad` (bool []) is up, copy the second of every pair to the first. An accelerator's host does not look at it."""
    if has_kernels(bad.device):
        restore_by_kernel(pairs, bad)
    elif bad.device.type != "cpu":
        for now, before in pairs:
            now.copy_(torch.where(bad, before, now))
    elif bool(bad):
        for now, before in pairs:
            now.copy_(before)
