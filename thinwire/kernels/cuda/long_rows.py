"""Exact top-k of whole tensors on CUDA outside the fused path: the kernels of `FusedTopK`, with a memory that is thrown away."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.fused_topk import FusedTopK
from thinwire.layout import Group, RowTable
from thinwire.wire.codec import Codec
from thinwire.wire.fixed import FixedWidthCode
from thinwire.wire.floats import FloatCode

ALIGNMENT = 16
"""Bytes to which the address of what is selected from is a multiple."""


class LongRows:
    """Some slots of a table, one row of any length each, in one flat float32 tensor."""

    def __init__(self, table: RowTable, members: Sequence[int], device: torch.device) -> None:
        rows = [table.rows[index] for index in members]
        slots = tuple(one.slot for one in rows)
        values, indices = FloatCode("fp32", torch.float32), FixedWidthCode("int32", short=False)
        self.codec = Codec(RowTable(rows, table.numel), values, indices)
        group = Group(slots, slots, table.numel, torch.float32, device)
        self.kernels = FusedTopK(group, self.codec, torch.float32, world=1)
        spans = [table.slot_slice(index) for index in members]
        places = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        self._places = None if len(places) == table.entries else places.to(device)
        """Where their entries are in the table; None if it has no others."""

    def select(self, c: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write row-local indices (int64), ascending in each row, and what c has there."""
        if c.data_ptr() % ALIGNMENT:
            c = c.clone()
        # A gradient of zeros: one that is not finite would not be selected, what is held is.
        payload = self.kernels.encode(torch.zeros_like(c), c, torch.empty_like(c), None)
        found = self.codec.sections(payload)[1].view(torch.int32).long()
        there = c[self.codec.table.positions(found)]
        if self._places is None:
            indices.copy_(found)
            values.copy_(there)
        else:
            indices.index_copy_(0, self._places, found)
            values.index_copy_(0, self._places, there)
