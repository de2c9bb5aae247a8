"""Segments: rows of many parts each that are worked on all at once, so that the number of operations does not
grow with the number of parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad


class Edges:
    """Where the segments begin and end: one behind the other, from element 0 on."""

    def __init__(self, edges: Sequence[int], device: torch.device | None = None) -> None:
        self.size = edges[-1]
        self.count = len(edges) - 1
        self.on_device = torch.tensor(edges, device=device)
        self.lengths = self.on_device.diff()


class Segments:
    """Rows [..., elements] in segments. Made anew where it is needed: a table of every element's segment, which it
    makes when asked, is too large to keep."""

    def __init__(self, edges: Edges) -> None:
        self.edges = edges
        self.count = edges.count

    @cached_property
    def of(self) -> Tensor:
        """int64: the segment of every element."""
        return torch.repeat_interleave(self.edges.lengths, output_size=self.edges.size)

    def spread(self, numbers: Tensor) -> Tensor:
        """One number per segment -> one per element, or one for all of them."""
        return numbers if self.count == 1 else numbers.index_select(-1, self.of)

    def cells(self, columns: Tensor, width: int) -> Tensor:
        """Flat places in a grid of segments x width, for one column per element."""
        return columns.long() if self.count == 1 else torch.add(columns, self.of, alpha=width)

    def count_up(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """(how many of the row are chosen up to and with each element, how many before each edge)."""
        up_to = chosen.cumsum(-1)
        return up_to, pad(up_to, (1, 0)).index_select(-1, self.edges.on_device)

    def turns(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """(how many are chosen of an element's segment up to and with it, how many in each segment)."""
        up_to, at_edges = self.count_up(chosen)
        return up_to - self.spread(at_edges[..., :-1]), at_edges.diff()
