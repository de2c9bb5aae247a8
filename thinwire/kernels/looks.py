"""Looks: what statistics say of the magnitudes of every slot, for selections that estimate a threshold from them.

One look answers for all slots of a bucket at once, in tensors with a number for each. Kernels answer in one pass over memory
(`thinwire.kernels.cuda.fused_estimate`), `TorchLook` slot by slot. Sums are in float64, so that their order shows in the last
bits of a float64 and hardly ever in a threshold, which is rounded to the numbers it is compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.described import Described


class Targets:
    """How long each slot is and how many entries it wants to send, and numbers that follow from that. Made once per table."""

    def __init__(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        """`pairs` are (length, wanted) of every slot."""
        self.pairs = pairs
        self.device = device
        self._kept: dict[Hashable, Tensor] = {}
        self.lengths = self._tensor([float(length) for length, _ in pairs])
        """float64 [slots]"""
        self.wanted = self._tensor([wanted for _, wanted in pairs])
        """int64 [slots]"""

    def numbers(self, name: Hashable, find: Callable[[int, int], float]) -> Tensor:
        """[slots]: what `find` returns for each (length, wanted), float64 or int64; asked once per name."""
        return self.keep(name, lambda: self._tensor([find(*pair) for pair in self.pairs]))

    def listed(self, name: Hashable, numbers: Sequence[float]) -> Tensor:
        """These numbers as float64, int64 or bool; copied once per name."""
        return self.keep(name, lambda: self._tensor(numbers))

    def keep(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` returned when this name was first asked for."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def _tensor(self, numbers: Sequence[float]) -> Tensor:
        dtype = torch.float64 if any(isinstance(n, float) for n in numbers) else None
        made = torch.tensor(numbers, dtype=dtype)
        # A copy for which the host does not wait.
        pinned = made.pin_memory() if self.device.type == "cuda" else made
        return pinned.to(self.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Tail(Described):
    """The magnitudes beyond a threshold, float64 [slots] each."""

    count: Tensor
    total: Tensor
    squares: Tensor
    """The sum of their squares."""
    signed: Tensor
    """The sum of the elements themselves."""
    smallest: Tensor
    """Infinite if there are none."""
    largest: Tensor
    """0 if there are none."""


class Look(ABC):
    """What can be asked of the slots. Thresholds are rounded to the dtype of the elements before they are compared."""

    targets: Targets
    readable = False
    """Whether the host can read an answer without a wait, to end a search early. Searches must not depend on it."""

    @abstractmethod
    def tail(self, beyond: Tensor | None = None) -> Tail:
        """Of the magnitudes above `beyond` [slots]; of all without it."""

    @abstractmethod
    def count(self, beyond: Tensor) -> Tensor:
        """Whole numbers: how many magnitudes are above each of `beyond`, [slots] or [slots, thresholds]."""


class TorchLook(Look):
    """The definition, slot by slot."""

    def __init__(self, pieces: Sequence[Tensor], targets: Targets) -> None:
        """`pieces` are the slots, each in one dimension."""
        self.pieces = pieces
        self.magnitudes = [piece.abs() for piece in pieces]
        self.targets = targets
        self.readable = targets.device.type == "cpu"

    def tail(self, beyond: Tensor | None = None) -> Tail:
        if beyond is None:
            beyond = torch.full_like(self.targets.lengths, -1.0)
        pairs = zip(self.pieces, self.magnitudes, beyond.unbind(), strict=True)
        rows = [tail_of(*pair) for pair in pairs]
        return Tail(*torch.stack(rows).unbind(1))

    def count(self, beyond: Tensor) -> Tensor:
        counts = [
            torch.stack([(sizes > limit.to(sizes.dtype)).sum() for limit in limits.unbind()])
            for sizes, limits in zip(
                self.magnitudes, beyond.reshape(len(self.pieces), -1).unbind(), strict=True
            )
        ]
        return torch.stack(counts).view(beyond.shape)


def tail_of(piece: Tensor, sizes: Tensor, limit: Tensor) -> Tensor:
    """float64 [6]: the fields of `Tail` for one slot."""
    above = sizes > limit.to(sizes.dtype)
    kept = torch.where(above, sizes, 0.0).double()
    fields = (
        above.sum().double(),
        kept.sum(),
        (kept * kept).sum(),
        torch.where(above, piece, 0.0).sum(dtype=torch.float64),
        torch.where(above, sizes, torch.inf).min().double(),
        kept.max(),
    )
    return torch.stack(fields)
