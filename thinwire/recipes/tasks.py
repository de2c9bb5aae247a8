"""Task: data x model, everything the training loop has to know about a job."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.recipes.config import Training


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, one per row."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class Data:
    """What is learned from and what is tested on; the same on every rank and for every seed."""

    train: Examples
    test: Examples


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training job without a method."""

    load: Callable[[], Data]
    build: Callable[[], nn.Module]
    """A freshly initialised model; draws from torch's global generator."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of (outputs, targets)."""
    score: Callable[[Tensor, Tensor], Tensor]
    """What each example contributes to the test score, whose mean is reported; more is better."""
    training: Training
    """How it is trained unless the user says otherwise."""


TASKS: dict[str, str] = {
    "digits": "thinwire.recipes.digits:TASK",
}
"""Where each task is; imported only when it is asked for."""


def find_task(name: str) -> Task:
    """A task by its name, or the user's own as 'module:attribute'."""
    place = TASKS.get(name, name)
    module_name, _, attribute = place.partition(":")
    if not attribute:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(
            f"task is {name!r}; it must be one of {', '.join(TASKS)} or your own as module:attribute{hint}"
        )
    if name not in TASKS and "" not in sys.path:
        # As `python -m` does; the installed command does not look where the user is.
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(f"task is {name!r}, but there is no module {error.name!r}") from None
    if not isinstance(found, Task):
        raise UsageError(f"task is {name!r}, but {attribute} of {module_name} is not a Task")
    return found
