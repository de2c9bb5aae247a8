"""The slots of a group in the bucket, cut into pieces that are set to zero (clear.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.structs import declare, i32, i64, make_room, make_table
from thinwire.layout import Group

CLEARED = 1 << 14
"""Elements of the bucket that one block clears."""
Cleared = declare("Cleared", (i64, "bucket"), (i32, "count unused"))


def cut_cleared(group: Group | None) -> Tensor:
    """struct Cleared of every part of every slot of the bucket; none without a group."""
    tables = [make_room(Cleared, 0, torch.device("cpu"))]
    for slot in group.sources if group is not None else ():
        starts = torch.arange(0, slot.numel, CLEARED)
        counts = (slot.numel - starts).clamp(max=CLEARED)
        tables.append(make_table(Cleared, bucket=slot.offset + starts, count=counts))
    return torch.cat(tables)
