"""Planes of signs on CUDA (signs.cu): written, counted and read in one pass each."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_table
from thinwire.kernels.cuda.toolchain import Toolchain, has_kernels, toolchain_of
from thinwire.layout import Group

THREADS = 256
BITS = 8
"""Signs of a byte."""
PART = 4096
"""Elements to which one block adds."""
SignPart = declare("SignPart", (i64, "offset"), (i32, "count slot"))
"""signs.cu: neighbours of a slot."""
DEFINES: Defines = (
    ("GRADIENT_CODE", "FLOAT32"),
    ("SIGN_THREADS", THREADS),
    layout_of(SignPart),
)


def sign_toolchain(device: torch.device, dtype: torch.dtype, numel: int) -> Toolchain | None:
    """Whose kernels write the signs of so many elements; None if torch has to."""
    return None if reason_against_kernels(device, dtype, numel) else toolchain_of(device)


def reason_against_kernels(device: torch.device, dtype: torch.dtype, numel: int) -> str | None:
    """Why kernels cannot write the signs of so many elements, as a sentence; None if they can."""
    if not has_kernels(device):
        return f"there are no kernels for {device}"
    if dtype != torch.float32:
        return f"the kernels do not write signs of {dtype}"
    if not numel:
        return "there is nothing to write"
    if numel >= 1 << 31:
        return "the kernels count the elements of a bucket with 32 bits"
    return None


class SignPlanes:
    """Signs of float32 values, with a plane of votes where zeros `abstain`."""

    def __init__(self, toolchain: Toolchain, abstain: bool) -> None:
        self._toolchain = toolchain
        self._abstain = int(abstain)
        self._planes = 2 if abstain else 1

    def write(self, values: Tensor, world: int, share: int) -> Tensor:
        """uint8 [world, planes x share / 8]: the signs of `share` neighbours for each rank, zeros behind the last."""
        length = share // BITS
        made = values.new_empty(world, self._planes * length, dtype=torch.uint8)
        self._start("write_signs", world * length, [values, made, values.numel(), length])
        return made

    def count(self, ballots: Tensor) -> Tensor:
        """uint8 [planes x share / 8]: the sign of the sum over all rows."""
        world, length = ballots.shape[0], ballots.shape[1] // self._planes
        made = torch.empty_like(ballots[0])
        kernel = self._toolchain.compile("signs.cu", "count_votes", DEFINES)
        args = [ballots.contiguous(), made, length, world, self._abstain]
        kernel(-(-length // THREADS), THREADS, args)
        return made

    def read(self, gathered: Tensor, count: int) -> Tensor:
        """float32 [count]: -1, 0 or 1."""
        world, length = gathered.shape[0], gathered.shape[1] // self._planes
        made = torch.empty(count, device=gathered.device)
        self._start("read_signs", world * length, [gathered.contiguous(), made, count, length])
        return made

    def _start(self, name: str, total: int, args: list[Tensor | int]) -> None:
        kernel = self._toolchain.compile("signs.cu", name, DEFINES)
        kernel(-(-total // THREADS), THREADS, [*args, total, self._abstain])


class SignAdder:
    """Signs of a group's buffer: written in one pass, and added to such a buffer in another."""

    def __init__(self, group: Group, toolchain: Toolchain) -> None:
        self._planes = SignPlanes(toolchain, abstain=False)
        self._kernel = toolchain.compile("signs.cu", "add_signs", DEFINES)
        tables = []
        for index, slot in enumerate(group.slots):
            starts = torch.arange(0, slot.numel, PART)
            counts = (slot.numel - starts).clamp(max=PART)
            offsets = slot.offset + starts
            tables.append(make_table(SignPart, offset=offsets, count=counts, slot=index))
        self._parts = torch.cat(tables).to(group.device)

    def write(self, c: Tensor) -> Tensor:
        """uint8: a bit for each element, up if it is not negative."""
        return self._planes.write(c, 1, -(-c.numel() // BITS) * BITS)[0]

    def add(self, flat: Tensor, signs: Tensor, scales: Tensor) -> None:
        """Add every row's signs, times the row's scale of the slot, row by row; uint8 [rows, bytes], float32 [rows, slots]."""
        scales = scales.float().contiguous()
        args = [flat, signs, scales, self._parts, len(signs), signs.shape[1], scales.shape[1]]
        self._kernel(len(self._parts), THREADS, args)
