"""Rows cut into chunks, a block for each: what kernels that share a row hand to each other (chunks.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.kernels.cuda.prepared import ROW_WARPS
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import Row, declare, i32, i64, layout_of, make_table, read_column

CHUNK_THREADS = 256
"""Threads of a block that collects candidates from one chunk."""
CHUNK_ROOM = 4096
"""Elements that such a block has registers for."""
BINS = 1024
"""Of a histogram of magnitudes. As many threads look for the k-th of them."""
Chunk = declare("Chunk", (i64, "gradient memory"), (i32, "row start count stride vector slot"))
"""chunks.cuh: elements of a row from which one block collects candidates."""
Section = declare("Section", (i32, "start count place ties"))
"""chunks.cuh: the candidates of a chunk."""
DEFINES: Defines = (
    ("CHUNK_THREADS", CHUNK_THREADS),
    ("CHUNK_ROOM", CHUNK_ROOM),
    ("BINS", BINS),
    ("SEND_WARPS", ROW_WARPS),
    *map(layout_of, (Chunk, Section)),
)


def cut_chunks(row: Tensor, number: int, size: int) -> Tensor:
    """struct Chunk of one row, the `number`-th; `row` is its struct Row."""
    assert size <= CHUNK_ROOM
    names = ("gradient", "memory", "length", "stride", "slot")
    gradient, memory, length, stride, slot = (int(read_column(Row, row, name)) for name in names)
    starts = torch.arange(0, length, size)
    gradients, memories = gradient + starts * stride, memory + starts * stride
    counts = (length - starts).clamp(max=size)
    aligned = (gradients % 4 == 0) & (memories % 4 == 0) & (counts % 4 == 0)
    return make_table(
        Chunk,
        gradient=gradients,
        memory=memories,
        row=number,
        start=starts,
        count=counts,
        stride=stride,
        vector=aligned & (stride == 1),
        slot=slot,
    )


def make_lists(candidates: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(float32 values, int16 places in the chunk) of so many candidates."""
    if candidates >= 1 << 31:
        raise ExchangeError(f"a bucket's candidates ({candidates}) do not fit 31-bit places")
    values = torch.zeros(candidates, device=device)
    return values, torch.zeros(candidates, dtype=torch.int16, device=device)
