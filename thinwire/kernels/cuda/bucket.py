"""Kernels over whole buckets: the first look at a gradient, whether all is finite, and marking a bad step."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Kernel, PreparedLaunch, Varying
from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_rows, make_table
from thinwire.kernels.cuda.toolchain import Toolchain, toolchain_of
from thinwire.layout import BucketLayout, Group

THREADS = 256
INSPECT_PART = 4096
"""Elements that one block inspects."""
BucketPart = declare("BucketPart", (i64, "offset"), (i32, "count slot"))
"""bucket.cu: neighbours in the bucket."""
DEFINES: Defines = (
    ("INSPECT_THREADS", THREADS),
    ("INSPECT_PART", INSPECT_PART),
    layout_of(BucketPart),
)


class Poison:
    """Makes a bucket not-a-number everywhere if a flag is up. Otherwise it reads the flag and nothing else."""

    def __init__(self, layout: BucketLayout) -> None:
        toolchain = toolchain_of(layout.device)
        parts = [
            {"offset": begin + start, "count": count}
            for begin, numel in layout.buffers
            for start, count in _parts(toolchain, numel)
        ]
        kernel, blocks = _compile(toolchain, "poison", layout.dtype), toolchain.tuning.look_blocks
        bucket, bad = map(Varying, ("bucket", "bad"))
        table = make_rows(BucketPart, parts).to(layout.device)
        self._launch = PreparedLaunch(kernel, blocks, THREADS, [bucket, bad, table, len(table)])

    def __call__(self, bucket_flat: Tensor, bad: Tensor) -> None:
        self._launch.start({"bucket": bucket_flat.data_ptr(), "bad": bad.data_ptr()})


def find_non_finite(flat: Tensor) -> Tensor:
    """bool []: an element is not finite."""
    toolchain = toolchain_of(flat.device)
    bad = torch.zeros((), dtype=torch.bool, device=flat.device)
    kernel = _compile(toolchain, "find_non_finite", flat.dtype)
    for start, count in _parts(toolchain, flat.numel()):
        kernel(toolchain.tuning.look_blocks, THREADS, [flat[start:], bad, count])
    return bad


def drop_non_finite(flat: Tensor, flag: Tensor) -> None:
    """Elements that are not finite become 0 if a flag is up. Otherwise it reads the flag and nothing else."""
    toolchain = toolchain_of(flat.device)
    kernel = _compile(toolchain, "drop_non_finite", flat.dtype)
    for start, count in _parts(toolchain, flat.numel()):
        kernel(toolchain.tuning.look_blocks, THREADS, [flat[start:], flag, count])


def cut_slots(group: Group) -> Tensor:
    """struct BucketPart of every part of every slot, for `inspect_slots`."""
    tables = []
    for index, slot in enumerate(group.sources):
        starts = torch.arange(0, slot.numel, INSPECT_PART)
        counts = (slot.numel - starts).clamp(max=INSPECT_PART)
        offsets = slot.offset + starts
        tables.append(make_table(BucketPart, offset=offsets, count=counts, slot=index))
    return torch.cat(tables).to(group.device)


def inspect_slots(bucket_flat: Tensor, parts: Tensor, slots: int) -> Tensor:
    """float32 [slots]: the largest magnitude, not finite if an element is not. Such elements become 0 in the bucket."""
    largest = torch.zeros(slots, dtype=torch.int32, device=bucket_flat.device)
    if len(parts):
        kernel = _compile(toolchain_of(bucket_flat.device), "inspect_slots", bucket_flat.dtype)
        kernel(len(parts), THREADS, [bucket_flat, parts, largest])
    return largest.view(torch.float32)


def bucket_defines(dtype: torch.dtype) -> Defines:
    return (("GRADIENT_CODE", FLOAT_CODES[dtype]), *DEFINES)


def _compile(toolchain: Toolchain, name: str, dtype: torch.dtype) -> Kernel:
    return toolchain.compile("bucket.cu", name, bucket_defines(dtype))


def _parts(toolchain: Toolchain, numel: int) -> list[tuple[int, int]]:
    """(start, elements) of every launch: kernels count with 32 bits."""
    most = toolchain.tuning.launch_elements
    return [(start, min(most, numel - start)) for start in range(0, numel, most)]
