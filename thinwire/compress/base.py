"""Compressor: a method at work for all parameters assigned to it, and what it decides once for every group of them.

Compressor   one per method: memory, learned state
GroupPlan    one per compressor and bucket layout: the slots of a bucket that travel together
Route        one per group and combination of modes: which backend does the work, what it sends
Opened       one per group and step: a program on its way, and the account to settle
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Place, Program
from thinwire.kernels.journal import Journal
from thinwire.layout import Group, ParameterInfo, Shard, Slot, wide_dtype
from thinwire.memory.account import Account
from thinwire.memory.base import Stores

BUCKET_ALIGNMENT = 16
"""Bytes to which a bucket's address is a multiple if kernels may read it 16 bytes at a time."""


@dataclass(frozen=True)
class Terms:
    """What is the same for every group of a bucket layout, beside the layout itself."""

    place: Place
    gradient_dtype: torch.dtype
    aligned: bool
    """Whether the bucket begins at a multiple of `BUCKET_ALIGNMENT`."""
    deterministic: bool = False
    """Whether bits may not depend on which parameters share a bucket."""


@dataclass(eq=False)
class GroupStep:
    """One group in one step. Not frozen: that would take three times as long to make, in every step of every bucket."""

    bucket_flat: Tensor
    """The whole bucket with this rank's local gradient."""
    counts: Sequence[int]
    """How often each slot has been exchanged before; the same on all ranks."""
    scale: Tensor | None
    """The GradScaler's scale of these gradients."""


@dataclass(eq=False)
class Opened:
    """A group on its way: run `program`, then settle `account`."""

    program: Program[Outcome]
    account: Account | None = None
    finish: Callable[[Outcome], Outcome] | None = None
    """What is left to do with the program's outcome, once those of all groups of the bucket are there."""


class Route(ABC):
    """How one group travels in one combination of modes, decided once. `open` begins it in one step."""

    backend: str = "torch"
    """Who does the work, in a word or two for `handle.plan()`."""
    objection: str | None = None
    """Why no faster backend does it, as a sentence."""
    compressed: bool = True
    """False where every element travels; such slots do not count towards the realised density."""
    kept_bytes: int = 0
    """What a step keeps beside memory until its verdict, so that what was sent can be taken back."""
    gathered_bytes: float = 0.0
    """Bytes this rank sends if what it sends, or its last part, is gathered by a request that others can share, else 0."""
    gathered_after: int = 0
    """Rounds of requests before that one."""

    def __init__(
        self, group: Group, slot_bytes: Sequence[float], entries: Sequence[int] | None
    ) -> None:
        self.group = group
        self.slot_bytes = slot_bytes
        """Bytes this rank is expected to send on behalf of each slot."""
        self.entries = entries
        """Entries this rank sends per slot where shapes alone tell it; None = the outcome has the counts."""

    @abstractmethod
    def open(self, step: GroupStep) -> Opened:
        """Take the gradient out of the bucket and memory; what is left to do is in the returned program."""

    def carrying(self, companion: Group, *, summed: bool) -> CarryingRoute | None:
        """The same route with a dense group of the same bucket in its launches and buffers; None where it cannot.

        The companion is gathered with the payload, or `summed` beside it.
        """
        return None


class CarryingRoute(Route):
    """A route that may take a dense group of the same bucket along."""

    @property
    @abstractmethod
    def wrong(self) -> Tensor:
        """bool []: something was not finite in the last step, here or in the companion."""


class GroupPlan(ABC):
    """What one compressor does with the slots of one bucket layout."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def begin(self, counts: Sequence[int]) -> Hashable:
        """Begin the next exchange and return the modes it is in, the same on all ranks. Equal modes have equal routes."""
        return None

    @abstractmethod
    def route(self, modes: Hashable) -> Route:
        """How the group travels in these modes."""

    def join(self, modes: Hashable, others: Sequence[Route]) -> list[Route]:
        """This group's route and those of the groups behind it in the same bucket, which may change for it."""
        return [self.route(modes), *others]


class Compressor(ABC):
    """A method's state and behaviour for all parameters assigned to it."""

    memory: Stores | None = None
    """Where this method holds back what it did not send."""
    travels_whole: ClassVar[bool] = False
    """Whether every element is sent. Such groups come first in a bucket: they need no encoding and can leave at once."""

    @abstractmethod
    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        """Decide what can be decided before the first step of a group."""

    def keep_journal(self, journal: Journal) -> None:
        """Note there what steps change, so that one that is skipped leaves no trace. Called before the first step."""
        if self.memory is not None:
            self.memory.keep_journal(journal)

    def working_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        """Of the buffers that a group is worked on in."""
        return wide_dtype(gradient_dtype)

    def expect(self, info: ParameterInfo, device: torch.device) -> None:  # noqa: B027
        """Learn of a parameter before its first step: its state may be asked for earlier."""

    def shard(self, slot: Slot, place: Place) -> Shard:
        """The part of a parameter of which this rank holds back what is not sent."""
        return Shard(slot.shape)

    def shared_state(self, name: str) -> dict[str, Tensor]:
        """Copies of what is kept of a parameter and is the same on all ranks, as long as replicas are."""
        return {}

    def load_shared_state(self, name: str, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Replace what `shared_state` returned."""

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What must survive a restart beside the memory, per parameter name, for all `names`."""
        return {}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:  # noqa: B027
        """Take from `state` what belongs to this compressor's parameters."""
