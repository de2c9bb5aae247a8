"""Examples: what a training set gives the loop, and how its epochs are dealt out to the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.recipes.config import DataOptions as DataOptions

if TYPE_CHECKING:
    from thinwire.recipes.kinds import Kind

Batch = tuple[Tensor, ...]
"""What one step of one worker learns from; the kind of the data says what is at which place."""


class Examples(ABC):
    """A set of examples that can be asked for any few of them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        """The examples at these places, stacked.

        Random augmentation and masking draw from `generator` (on the CPU), so that a step can be repeated. Without one the batch is
        the same every time, as evaluation needs it.
        """

    def batches(
        self, indices: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> list[Batch]:
        """`batch` of several workers, of whom each draws from its own generator.

        A set that lies on the device fetches all of them at once, because there it is calls that cost.
        """
        return [self.batch(*one) for one in zip(indices, generators, strict=True)]

    def to(self, device: torch.device) -> Examples:
        """The same examples where the model is, if they fit; else batches are moved one by one."""
        return self

    def deal(
        self, *, seed: int, epoch: int, rank: int, world: int, batch_size: int
    ) -> list[Tensor]:
        """The places of each step of one epoch for one rank: one shuffle common to all ranks, dealt out in turn.

        Every rank has the same number of steps. The rest, which does not fill a batch on every worker, is left out.
        """
        steps = count_steps(len(self), world, batch_size)
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        mine = torch.randperm(len(self), generator=generator)[rank::world]
        return list(mine[: steps * batch_size].split(batch_size))

    def deal_test(self, *, rank: int, world: int, batch_size: int) -> list[Tensor]:
        """The places of each evaluation batch of one rank: every example once, over all ranks."""
        return list(torch.arange(rank, len(self), world).split(batch_size))


@dataclass(frozen=True)
class TensorExamples(Examples):
    """Examples that lie in memory, one per row of each column."""

    columns: Batch

    def __len__(self) -> int:
        return len(self.columns[0])

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        places = send(index, self.columns[0].device)
        return tuple(column[places] for column in self.columns)

    def to(self, device: torch.device) -> TensorExamples:
        return TensorExamples(tuple(column.to(device) for column in self.columns))


@dataclass(frozen=True)
class Data:
    """What is learned from and what is tested on; the same on every rank and for every seed."""

    kind: Kind
    train: Examples
    test: Examples

    def to(self, device: torch.device) -> Data:
        return Data(self.kind, self.train.to(device), self.test.to(device))


def send(places: Tensor, device: torch.device) -> Tensor:
    """What the CPU has chosen, on the device; from pinned memory, so that nobody waits until the device has come so far."""
    pinned = places.pin_memory() if device.type == "cuda" else places
    return pinned.to(device, non_blocking=True)


def split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """The batches of several workers, of which this one holds so many rows each."""
    return list(zip(*(column.split(sizes) for column in batch), strict=True))


def count_steps(examples: int, world: int, batch_size: int) -> int:
    """Steps per epoch; the rest that does not fill a batch on every worker is left out."""
    steps = examples // (world * batch_size)
    if steps == 0:
        raise UsageError(
            f"batch_size is {batch_size} on {world} workers; together they must take "
            f"at most the {examples} training examples in a step"
        )
    return steps
