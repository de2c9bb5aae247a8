"""Backends: who can do the work of a sparse method, found by what its parts say of themselves.

A backend lists the forms it knows of each part (`thinwire.forms`). The first registered one that knows all of them, on this
device, takes the group; the plain parts, in torch, take everything else. A part from outside the package gets the fast
path by naming a form that a backend knows, or by registering a backend of its own:

    register_backend(Backend("mine", selections={"my form"}, ..., route=MyRoute))
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch

from thinwire.compress.base import BUCKET_ALIGNMENT, Route, Terms
from thinwire.compress.refresh import MeanGradient
from thinwire.exchange.base import Exchange
from thinwire.layout import Group
from thinwire.memory.base import MemoryState
from thinwire.memory.clip import Clip
from thinwire.select.base import Turn
from thinwire.wire.codec import Codec


@dataclass(eq=False)
class SparseTask:
    """What a backend is asked to do: one group of a sparse method in one combination of modes."""

    group: Group
    terms: Terms
    selection: Turn
    memory: MemoryState
    codec: Codec
    exchange: Exchange
    clip: Clip | None
    slot_bytes: list[float]
    entries: list[int] | None
    shared: dict[str, object]
    """Kept for all tasks of the group, for backends that share buffers between modes."""
    mean_gradient: MeanGradient
    """How the memory's divisor is refreshed in these modes, if it is."""

    def gathered(self) -> tuple[float, int]:
        """(what this rank sends if a part of it is gathered by a request that others can share, rounds before that)."""
        after = self.exchange.gathered_after
        if after is None or self.terms.place.world == 1:
            return 0.0, 0
        return sum(self.slot_bytes), after


@dataclass(frozen=True)
class Backend:
    """What somebody can do, and the route that does it."""

    name: str
    selections: Set[str]
    memories: Set[str]
    values: Set[str]
    indices: Set[str]
    exchanges: Set[str]
    gradients: Set[torch.dtype]
    serves: Callable[[torch.device], bool]
    """Whether it works on a device."""
    route: Callable[[SparseTask], Route]

    def objection(self, task: SparseTask) -> str | None:
        """Why it cannot do that, as a sentence; None if it can."""
        parts = (
            ("selection", task.selection.name, task.selection.form, self.selections),
            ("memory", repr(task.memory.setting), task.memory.setting.form, self.memories),
            ("value code", task.codec.values.name, task.codec.values.form, self.values),
            ("index code", task.codec.indices.name, task.codec.indices.form, self.indices),
            ("exchange", type(task.exchange).__name__, task.exchange.form, self.exchanges),
        )
        for what, name, form, known in parts:
            if form not in known:
                named = f"its form is {form!r}" if form is not None else "it names no form"
                return f"the {self.name} do not know the {what} {name}: {named}"
        if task.terms.gradient_dtype not in self.gradients:
            return f"the {self.name} do not take gradients of {task.terms.gradient_dtype}"
        if task.clip is not None:
            return f"the {self.name} do not clip"
        if not task.terms.aligned:
            return (
                f"the {self.name} read buckets that begin at a multiple of {BUCKET_ALIGNMENT} bytes"
            )
        if not self.serves(task.group.device):
            return f"the {self.name} do not run on {task.group.device}"
        return None


_backends: list[Backend] = []


def register_backend(backend: Backend) -> None:
    """Use `backend` wherever it can do the work; one that is registered later is asked first."""
    _backends.insert(0, backend)


def forget_backend(backend: Backend) -> None:
    """Take back a registration; groups that are planned already keep their routes."""
    _backends.remove(backend)


def find_backend(task: SparseTask) -> tuple[Backend | None, str]:
    """(the first that can do it, why the others cannot: the objection of one that knows the selection, if any does)."""
    if task.selection.torch_only:
        return None, f"no kernels know {task.selection.name} with {task.selection.torch_only}"
    objections: list[str] = []
    for backend in _backends:
        objection = backend.objection(task)
        if objection is None:
            return backend, ""
        known = task.selection.form in backend.selections
        objections.insert(0 if known else len(objections), objection)
    return None, objections[0] if objections else "no backend is registered"
