"""Groups: examples that come several at a time, such as all windows of a text that a question is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.recipes.examples import Batch, Examples, send, split

TESTED_NUMBERS = 1 << 15
"""Of a column, which a test takes at once whatever the batch size; a window of text is a few hundred."""


@dataclass(frozen=True, kw_only=True)
class Groups(Examples):
    """Whole numbers of any width, one example per row of each column; a place is a group of neighbouring rows."""

    columns: Batch
    """Kept narrow and handed out as int64."""
    first: Tensor
    """[groups + 1], on the CPU: group g has the rows first[g] up to first[g + 1]."""

    def __len__(self) -> int:
        return len(self.first) - 1

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        spans = zip(self.first[index].tolist(), self.first[index + 1].tolist(), strict=True)
        rows = torch.cat([torch.arange(*span) for span in spans])
        rows = send(rows, self.columns[0].device)
        return tuple(column[rows].long() for column in self.columns)

    def batches(
        self, indices: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> list[Batch]:
        rows = [int((self.first[index + 1] - self.first[index]).sum()) for index in indices]
        return split(self.batch(torch.cat(list(indices)), None), rows)

    def deal_test(self, *, rank: int, world: int, batch_size: int) -> list[Tensor]:
        at_once = max(batch_size, TESTED_NUMBERS // self.columns[0][0].numel())
        return super().deal_test(rank=rank, world=world, batch_size=at_once)

    def to(self, device: torch.device) -> Groups:
        return replace(self, columns=tuple(column.to(device) for column in self.columns))
