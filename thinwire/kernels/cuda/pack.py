"""Narrow memory on CUDA: a whole group is packed, or unpacked, in one launch.

Reference: `thinwire/memory/storage.py`, whose bits these are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Compiler, Kernel, compile_with_nvrtc
from thinwire.plan.groups import Group

BLOCK = 128
"""Elements that share an exponent."""
PIECE = 4096
"""Elements that one block of threads takes: what its warps have under way at once."""
THREADS = 256
LOOK_BLOCKS = 256
"""Blocks of a launch that usually only looks at a flag."""
PACK_CODES = {torch.bfloat16: 1, torch.int8: 2}


class PackKernels:
    """The kernels of one format on one group, for float32 values in the group's layout."""

    compiler: Compiler = staticmethod(compile_with_nvrtc)

    def __init__(self, group: Group, codes: torch.dtype) -> None:
        self._pieces = cut_slots(group).to(group.device)
        self._defines = (("PACK_CODE", PACK_CODES[codes]),)
        self._always = torch.ones(1, dtype=torch.uint8, device=group.device)

    def pack(self, flat: Tensor, codes: Tensor, exponents: Tensor, flag: Tensor | None) -> None:
        """Write codes and exponents; with a flag (a byte) only if that is up."""
        self._launch("pack_slots", [flat, codes, exponents], flag)

    def unpack(self, codes: Tensor, exponents: Tensor, flat: Tensor, flag: Tensor | None) -> None:
        """Write every element of `flat`, zeros between the slots; with a flag (a byte) only if that is up."""
        self._launch("unpack_slots", [codes, exponents, flat], flag)

    def _launch(self, name: str, tensors: list[Tensor], flag: Tensor | None) -> None:
        count = len(self._pieces)
        if not count:
            return
        kernel: Kernel = self.compiler("pack.cu", name, self._defines)
        blocks = count if flag is None else min(count, LOOK_BLOCKS)
        looked_at = self._always if flag is None else flag
        kernel((blocks, 1, 1), (THREADS, 1, 1), [*tensors, self._pieces, looked_at, count])


def cut_slots(group: Group) -> Tensor:
    """int64 [pieces, 3]: struct Piece of pack.cu, two 32-bit numbers to a word."""
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
        tables.append(torch.stack([slot.offset + places, places | counts << 32, blocks], 1))
        end = slot.offset + slot.numel
    tables.append(_gap(end, group.numel))
    return torch.cat(tables)


def _gap(start: int, end: int) -> Tensor:
    """A piece of nothing but a gap, if there is one."""
    rows = [[start, 0, (end - start) << 32]] if end > start else []
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
