"""PackKernels: narrow memory on CUDA. A whole group is packed or unpacked in one launch.

Reference: `thinwire/memory/storage.py`. The bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_table
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group

BLOCK = 128
"""Elements that share an exponent."""
PIECE = 4096
"""Elements that one block of threads takes: what its warps load at once."""
THREADS = 256
Piece = declare("Piece", (i64, "at"), (i32, "place count block gap"))
"""pack.cu: a part of a slot, and the gap behind it."""


def pack_defines(codes: torch.dtype) -> Defines:
    assert codes in (torch.bfloat16, torch.int8)
    return (("PACK_BFLOAT16", int(codes == torch.bfloat16)), ("BLOCK", BLOCK), layout_of(Piece))


class PackKernels:
    """The kernels of one format on one group, for float32 values in the group's layout."""

    def __init__(self, group: Group, codes: torch.dtype) -> None:
        self._toolchain = toolchain_of(group.device)
        self._pieces = cut_slots(group).to(group.device)
        self._defines = pack_defines(codes)
        self._always = torch.ones(1, dtype=torch.uint8, device=group.device)

    def pack(self, flat: Tensor, codes: Tensor, exponents: Tensor, flag: Tensor | None) -> None:
        """Write codes and exponents. With a flag (a byte), only if it is up."""
        self._launch("pack_slots", [flat, codes, exponents], flag)

    def unpack(self, codes: Tensor, exponents: Tensor, flat: Tensor, flag: Tensor | None) -> None:
        """Write every element of `flat`, zeros between the slots. With a flag (a byte), only if it is up."""
        self._launch("unpack_slots", [codes, exponents, flat], flag)

    def _launch(self, name: str, tensors: list[Tensor], flag: Tensor | None) -> None:
        count = len(self._pieces)
        if not count:
            return
        kernel = self._toolchain.compile("pack.cu", name, self._defines)
        blocks = count if flag is None else min(count, self._toolchain.tuning.look_blocks)
        looked_at = self._always if flag is None else flag
        kernel(blocks, THREADS, [*tensors, self._pieces, looked_at, count])


def cut_slots(group: Group) -> Tensor:
    """struct Piece of every part of every slot, and of gaps."""
    tables: list[Tensor] = []
    first_blocks, block = {}, 0
    for slot in group.slots:
        first_blocks[slot], block = block, block + -(-slot.numel // BLOCK)
    end = 0
    for slot in sorted(group.slots, key=lambda slot: slot.offset):
        tables.append(_gap(end, slot.offset))
        places = torch.arange(0, slot.numel, PIECE)
        counts = (slot.numel - places).clamp(max=PIECE)
        blocks = first_blocks[slot] + places // BLOCK
        at = slot.offset + places
        tables.append(make_table(Piece, at=at, place=places, count=counts, block=blocks))
        end = slot.offset + slot.numel
    tables.append(_gap(end, group.numel))
    return torch.cat(tables)


def _gap(start: int, end: int) -> Tensor:
    """A piece of nothing but a gap, if there is one."""
    starts = torch.arange(start, end, max(1, end - start))
    return make_table(Piece, at=starts, gap=end - start)
