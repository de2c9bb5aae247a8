"""Random places of all slots of a table in one launch (draw.cu)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i64, layout_of, make_table
from thinwire.kernels.cuda.toolchain import kernels_for
from thinwire.layout import RowTable

THREADS = 256
DrawnSlot = declare("DrawnSlot", (i64, "length keep"))
"""draw.cu: a tensor, and how many of its places are drawn."""
DEFINES: Defines = (("GRADIENT_CODE", "FLOAT32"), layout_of(DrawnSlot))


def prepare_draw(
    table: RowTable, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What draws places int64 [entries] from (seeds, steps), int64 [slots] of 32 bits each; None where there are no kernels."""
    toolchain = kernels_for(device)
    if toolchain is None or not table.entries:
        return None
    lengths, keeps = [rows.length for rows in table.rows], [rows.keep for rows in table.rows]
    slots = make_table(DrawnSlot, length=lengths, keep=keeps).to(device)
    known = [table.entry_slots(device), table.entry_places(device)]
    kernel, blocks = toolchain.compile("draw.cu", "draw", DEFINES), -(-table.entries // THREADS)

    def draw(seeds: Tensor, steps: Tensor) -> Tensor:
        places = torch.empty(table.entries, dtype=torch.int64, device=device)
        kernel(blocks, THREADS, [slots, seeds, steps, *known, places, table.entries])
        return places

    return draw
