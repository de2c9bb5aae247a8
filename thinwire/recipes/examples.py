"""Examples: what a training set gives the loop, and how its epochs are dealt out to the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.validate import check_bool, check_instance

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

        `generator` (on the CPU) is what random augmentation and masking draw from, so that a step can be repeated;
        None means none: the same batch every time, for evaluation.
        """

    def to(self, device: torch.device) -> Examples:
        """The same examples where the model is, if they fit; else batches are moved one by one."""
        return self

    def deal(
        self, *, seed: int, epoch: int, rank: int, world: int, batch_size: int
    ) -> list[Tensor]:
        """The places of each step of one epoch for one rank: one shuffle common to all ranks, dealt out in turn.

        Every rank has the same number of steps; the rest that does not fill a batch on every worker waits for
        another shuffle.
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
        return tuple(column[index.to(column.device)] for column in self.columns)

    def to(self, device: torch.device) -> TensorExamples:
        return TensorExamples(tuple(column.to(device) for column in self.columns))


@dataclass(frozen=True)
class Data:
    """What is learned from and what is tested on; the same on every rank and for every seed."""

    kind: Kind
    train: Examples
    test: Examples


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where data comes from."""

    data_dir: Path | None = None
    """The folder that holds the data sets in their official layouts; THINWIRE_DATA unless given."""
    synthetic: bool = False
    """Random data of the right shape instead of real data."""
    tiny: bool = False
    """Few and small synthetic examples, and short windows (small crops) of real data, for the two-layer models of --tiny."""
    download: bool = False
    """Fetch missing files from their official place and check them."""

    def __post_init__(self) -> None:
        if self.data_dir is not None:
            check_instance("data_dir", self.data_dir, Path, "the path of a folder")
        for name in ("synthetic", "tiny", "download"):
            check_bool(name, getattr(self, name))


def count_steps(examples: int, world: int, batch_size: int) -> int:
    """Steps per epoch; the rest that does not fill a batch on every worker is left out."""
    steps = examples // (world * batch_size)
    if steps == 0:
        raise UsageError(
            f"batch_size is {batch_size} on {world} workers; together they must take "
            f"at most the {examples} training examples in a step"
        )
    return steps
