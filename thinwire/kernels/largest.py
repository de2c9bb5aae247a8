"""One look at a group's gradients on CUDA: the largest magnitude of every slot, non-finite elements set to 0 in place.

One launch over all slots, one read of memory; only a bad gradient is written. Reference: `kernels.inspection.inspect_pieces`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.plan.groups import Group

BLOCK = 4096


def block_table(group: Group) -> Tensor:
    """int64 [blocks, 3]: bucket offset, elements, slot number of every block of every slot."""
    parts = []
    for which, slot in enumerate(group.sources):
        starts = torch.arange(0, slot.numel, BLOCK)
        part = torch.empty(len(starts), 3, dtype=torch.int64)
        part[:, 0] = slot.offset + starts
        part[:, 1] = (slot.numel - starts).clamp(max=BLOCK)
        part[:, 2] = which
        parts.append(part)
    return torch.cat(parts).to(group.device)


def largest_and_clean(bucket_flat: Tensor, table: Tensor, slots: int) -> Tensor:
    """float32 [slots]: largest magnitude (NaN or infinite if an element is); cleans `bucket_flat` in place."""
    largest = torch.zeros(slots, dtype=torch.int32, device=bucket_flat.device)
    _largest_and_clean[(table.shape[0],)](bucket_flat, table, largest, BLOCK=BLOCK, num_warps=8)
    return largest.view(torch.float32)


@triton.jit
def _largest_and_clean(flat, table, largest, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    offset = tl.load(table + block * 3)
    count = tl.load(table + block * 3 + 1)
    slot = tl.load(table + block * 3 + 2)
    j = tl.arange(0, BLOCK)
    inside = j < count
    values = tl.load(flat + offset + j, mask=inside, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bad = bits >= 0x7F800000
    tl.store(
        flat + offset + j,
        tl.zeros([BLOCK], tl.float32).to(flat.dtype.element_ty),
        mask=inside & bad,
    )
    # Magnitude bits order like magnitudes, with infinity and NaN on top, and an integer maximum has no rounding order.
    tl.atomic_max(largest + slot, tl.max(bits, axis=0))
