"""Looks: what statistics say of the magnitudes of every slot, for selections that estimate a threshold from them.

One look answers for all slots of a bucket at once, in tensors with a number for each. Kernels answer in one pass over memory
(`thinwire.kernels.cuda.fused_estimate`), `TorchLook` slot by slot. Sums are in float64, so that their order shows in the last
bits of a float64 and hardly ever in a threshold, which is rounded to the numbers it is compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class Targets:
    """How long each slot is and how many entries it wants to send, and numbers that follow from that. Made once per table."""

    def __init__(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        """`pairs` are (length, wanted) of every slot."""
        self.pairs = pairs
        self.device = device
        self._kept: dict[Hashable, Tensor] = {}
        self._listed: dict[Hashable, tuple[list[float], Tensor]] = {}
        self.lengths = self._tensor([float(length) for length, _ in pairs])
        """float64 [slots]"""
        self.wanted = self._tensor([wanted for _, wanted in pairs])
        """int64 [slots]"""

    def numbers(self, name: Hashable, find: Callable[[int, int], float]) -> Tensor:
        """[slots]: what `find` returns for each (length, wanted), float64 or int64; asked once per name."""
        return self.keep(name, lambda: self._tensor([find(*pair) for pair in self.pairs]))

    def listed(self, name: Hashable, numbers: Sequence[float]) -> Tensor:
        """These numbers as float64, int64 or bool; copied only if they are others than the last ones of this name."""
        known = self._listed.get(name)
        if known is None or known[0] != list(numbers):
            self._listed[name] = known = (list(numbers), self._tensor(numbers))
        return known[1]

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


class Tail(Protocol):
    """The magnitudes beyond a threshold, float64 [slots] each."""

    @property
    def count(self) -> Tensor: ...
    @property
    def total(self) -> Tensor: ...
    @property
    def squares(self) -> Tensor:
        """The sum of their squares."""

    @property
    def signed(self) -> Tensor:
        """The sum of the elements themselves."""

    @property
    def smallest(self) -> Tensor:
        """Infinite if there are none."""

    @property
    def largest(self) -> Tensor:
        """0 if there are none."""


@dataclass(frozen=True, eq=False)
class MeasuredTail:
    """All of them, measured at once."""

    count: Tensor
    total: Tensor
    squares: Tensor
    signed: Tensor
    smallest: Tensor
    largest: Tensor


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
        return TorchTail(self.pieces, self.magnitudes, beyond)

    def count(self, beyond: Tensor) -> Tensor:
        counts = [
            torch.stack(
                [(sizes > limit.to(sizes.dtype)).count_nonzero() for limit in limits.unbind()]
            )
            for sizes, limits in zip(
                self.magnitudes, beyond.reshape(len(self.pieces), -1).unbind(), strict=True
            )
        ]
        return torch.stack(counts).view(beyond.shape)


class TorchTail:
    """The definition; only what is asked for is computed."""

    def __init__(
        self, pieces: Sequence[Tensor], magnitudes: Sequence[Tensor], beyond: Tensor | None
    ) -> None:
        self._pieces, self._magnitudes = pieces, magnitudes
        self._above: list[Tensor] | None = None
        if beyond is not None:
            pairs = zip(magnitudes, beyond.unbind(), strict=True)
            self._above = [sizes > limit.to(sizes.dtype) for sizes, limit in pairs]

    def _kept(self, tensors: Sequence[Tensor], other: float) -> list[Tensor]:
        """Those of some elements that count, and `other` in place of the others."""
        if self._above is None:
            return list(tensors)
        pairs = zip(self._above, tensors, strict=True)
        return [torch.where(above, tensor, other) for above, tensor in pairs]

    @cached_property
    def _wide(self) -> list[Tensor]:
        return [kept.double() for kept in self._kept(self._magnitudes, 0.0)]

    @cached_property
    def count(self) -> Tensor:
        above = self._above or [torch.ones_like(one, dtype=torch.bool) for one in self._pieces]
        return torch.stack([one.count_nonzero() for one in above]).double()

    @cached_property
    def total(self) -> Tensor:
        return torch.stack([wide.sum() for wide in self._wide])

    @cached_property
    def squares(self) -> Tensor:
        return torch.stack([torch.dot(wide, wide) for wide in self._wide])

    @cached_property
    def signed(self) -> Tensor:
        return torch.stack([kept.double().sum() for kept in self._kept(self._pieces, 0.0)])

    @cached_property
    def smallest(self) -> Tensor:
        kept = self._kept(self._magnitudes, torch.inf)
        return torch.stack([one.min() for one in kept]).double()

    @cached_property
    def largest(self) -> Tensor:
        return torch.stack([one.max() for one in self._kept(self._magnitudes, 0.0)]).double()
