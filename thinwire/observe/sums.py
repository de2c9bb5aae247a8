"""DeviceSums: sums that only the device knows until somebody asks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)


class DeviceSums(Generic[K]):
    """One sum per key and stream: programs on different streams do not wait for each other, and the memory of an
    old sum is the stream's own, which may use it again at once."""

    def __init__(self) -> None:
        self._sums: dict[tuple[K, int], Tensor] = {}

    def add(self, key: K, value: Tensor) -> None:
        stream = torch.cuda.current_stream(value.device).cuda_stream if value.is_cuda else 0
        so_far = self._sums.get((key, stream))
        self._sums[key, stream] = value if so_far is None else so_far + value

    def take(self) -> list[tuple[K, Tensor]]:
        """All sums, which begin again from nothing; a key may come more than once."""
        taken = [(key, value) for (key, _), value in self._sums.items()]
        self._sums.clear()
        return taken

    def __len__(self) -> int:
        return len(self._sums)
