"""A second moment that learns from a mean gradient on CUDA: two launches, 16 bytes per element.

Reference: `AdamState.refresh` in thinwire/memory/adam.py. The bits are the same.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_table
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group

THREADS = 256
PART = 2048
"""Elements that one block takes."""
MomentPart = declare("MomentPart", (i64, "at"), (i32, "count slot"))
"""second_moment.cu: neighbours of a slot."""
DEFINES: Defines = (
    ("GRADIENT_CODE", FLOAT_CODES[torch.float32]),
    ("MOMENT_THREADS", THREADS),
    ("MOMENT_PART", PART),
    layout_of(MomentPart),
)


def learn_moments(group: Group, held: Tensor, now: Tensor, mean: Tensor, kept: float) -> Tensor:
    """`now` = kept `held` + (1 - kept) mean^2, where that is finite, in slots whose mean is not 0; elsewhere `held`.

    All are float32 in the group's layout; `now` may be `held`. Returns bool [slots]: whose mean is not 0.
    """
    had = torch.zeros(len(group.slots), dtype=torch.bool, device=group.device)
    if group not in _parts:
        _parts[group] = cut_slots(group).to(group.device)
    parts, toolchain = _parts[group], toolchain_of(group.device)
    source = "second_moment.cu"
    find = toolchain.compile(source, "find_means", DEFINES)
    find(len(parts), THREADS, [mean, parts, had])
    learn = toolchain.compile(source, "learn_moments", DEFINES)
    learn(len(parts), THREADS, [held, now, mean, parts, had, float(kept), float(1 - kept)])
    return had


_parts: WeakKeyDictionary[Group, Tensor] = WeakKeyDictionary()


def cut_slots(group: Group) -> Tensor:
    """struct MomentPart of every part of every slot."""
    tables = []
    for index, slot in enumerate(group.slots):
        starts = torch.arange(0, slot.numel, PART)
        counts = (slot.numel - starts).clamp(max=PART)
        tables.append(make_table(MomentPart, at=slot.offset + starts, count=counts, slot=index))
    return torch.cat(tables)
