"""Fused top-k on CUDA: memory, selection and packing in one pass, all ranks' entries to a gradient in another.

References: `Residual` or `MomentumCorrection`, `ExactTopK`, `Codec` and `AllGatherFast` chained by `SparseCompressor`, whose bits
these are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.columns import COLLECT_THREADS, SEND_THREADS
from thinwire.kernels.cuda.decode_parts import DECODE_THREADS, decode_parts
from thinwire.kernels.cuda.dense import THREADS, cut_stretches, packed_bytes
from thinwire.kernels.cuda.giants import BINS
from thinwire.kernels.cuda.joint import JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import Defines, Kernel, Site, Varying
from thinwire.kernels.cuda.prepared import (
    BAD,
    BESIDE,
    BUCKET,
    FLOAT_CODES,
    GATHERED,
    LOOK_BLOCKS,
    MEMORY,
    MOMENTUM_NAMES,
    OUT,
    PAYLOAD,
    RATIO,
    ROW_WARPS,
    STRIDE,
    UNUSED,
    USED,
    PreparedKernels,
)
from thinwire.kernels.cuda.rows import STREAM_WARPS
from thinwire.kernels.cuda.tables import WARP, Tables, make_tables
from thinwire.plan.groups import Group
from thinwire.wire.codec import Codec

CHUNK_THREADS = 256
QUAD = 16
"""Bytes of a payload that one thread clears."""
LOOK_THREADS = 256
MOST_BOOKS = 60
MOST_AT_ONCE = 1 << 30
"""Elements of a bucket in one launch."""


class Book(ctypes.Structure):
    """struct Book of settle.cu; tensors must outlive the launch."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("used", ctypes.c_void_p),
        ("unused", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("momentum", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Correction:
    """Momentum correction as the kernels know it (momentum.cuh)."""

    momentum: float
    nesterov: bool
    masking: bool

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return ("MOMENTUM", 2 if self.nesterov else 1), ("MASKING", int(self.masking))

    def parameters(self, kept: Tensor) -> list[Any]:
        """MOMENTUM_PARAMETERS."""
        u, ratio = map(Varying, MOMENTUM_NAMES)
        return [u, kept, ratio, self.momentum]


class FusedTopK(PreparedKernels):
    """Exact top-k, with the memory or the momentum that `correction` says.

    `beside` is a group of float32 slots of the same bucket that travels whole: before the payload in the same buffer, in the
    same launches. It is gathered with the payload, or `summed` by itself.
    """

    def __init__(
        self,
        group: Group,
        codec: Codec,
        gradient_dtype: torch.dtype,
        world: int,
        correction: Correction | None = None,
        beside: Group | None = None,
        summed: bool = False,
    ) -> None:
        super().__init__(group, codec, gradient_dtype, world)
        self.summed = summed
        self._stretches = torch.zeros(0, 2, dtype=torch.int64, device=group.device)
        if beside is not None:
            assert gradient_dtype == torch.float32
            self.before = packed_bytes(beside)
            self._stretches = cut_stretches(beside)
        self.tables: Tables = make_tables(group, codec)
        self._correction = correction
        masks = correction is not None and correction.masking
        self._kept = torch.zeros(codec.table.entries if masks else 0, device=group.device)
        """What a momentum was wherever it was masked in the last step."""
        self._rows_at = self.tables.all_rows.data_ptr()
        self._row_count = len(self.tables.all_rows)
        self._kept_at = self._kept.data_ptr()
        self._prepare()
        give_back_all = ("settle.cu", "give_back_all", self._memory_defines, Book, MOST_BOOKS)
        self.joint: JointKernel = joint_kernel(self.compiler, *give_back_all, group.device)

    def _new_buffer(self) -> Tensor:
        size = self.before + self.codec.nbytes
        return torch.empty(size, dtype=torch.uint8, device=self.group.device)

    def open_momentum(self, u: Tensor, ratio: Tensor | None) -> list[Tensor]:
        """What `encode` and `give_back` of one step need to know of a momentum that is to be multiplied with `ratio` first."""
        return [u, self._one if ratio is None else ratio]

    def book(
        self,
        memory: Tensor,
        sent: Tensor,
        used: Tensor,
        unused: Tensor,
        momentum: Sequence[Tensor] = (),
    ) -> Book:
        """What `give_back` would be called with, for `joint`, which does it for all payloads of one format."""
        return Book(
            memory.data_ptr(),
            sent.data_ptr() + self.before,
            self._rows_at,
            used.data_ptr(),
            unused.data_ptr(),
            self._row_count,
            momentum[0].data_ptr() if momentum else None,
            self._kept_at,
        )

    # -- the launches -----------------------------------------------------------------------------------------

    def _encode_sites(self) -> Iterator[Site]:
        yield self._opening_site()
        yield from self._streamed_sites()
        yield from self._row_sites()
        yield from self._column_sites()
        yield from self._giant_sites()

    def _opening_site(self) -> Site:
        quads = self.codec.nbytes // QUAD
        copying = -(-quads // THREADS)
        status, stretches = self._status, self._stretches
        args = [self.tables.template, PAYLOAD, BUCKET, BESIDE, stretches, status, quads, copying]
        kernel = self._kernel("dense.cu", "open_payload")
        return Site(kernel, copying + len(stretches), THREADS, [*args, self.world])

    def _decode_sites(self) -> Iterator[Site]:
        t, slots = self.tables, self.codec.table.rows
        parts = decode_parts(slots, t.all_rows, len(self._stretches))
        read = [GATHERED, BESIDE, OUT, t.all_rows, parts, self._stretches, t.expected]
        rows_beside = 1 if self.summed else self.world
        known = [self.used, self._status, self._share, self.world, rows_beside, STRIDE, len(slots)]
        kernel = self._kernel("decode.cu", "decode")
        args = [*read, *known, int(self.into_bucket)]
        yield Site(kernel, len(parts), DECODE_THREADS, args)

    @property
    def _memory_defines(self) -> Defines:
        """Of kernels that know of momentum."""
        return (*self._defines, *(() if self._correction is None else self._correction.defines))

    def _memory_site(
        self,
        file: str,
        name: str,
        blocks: int,
        threads: int,
        args: Sequence[Any],
        shared_mem: int = 0,
        **more: int,
    ) -> Site:
        """Of a kernel that knows of momentum."""
        kernel = self.compiler(file, name, (*self._memory_defines, *more.items()))
        corrected = self._correction
        parameters = [] if corrected is None else corrected.parameters(self._kept)
        return Site(kernel, blocks, threads, [*args, *parameters], shared_mem)

    def _streamed_sites(self) -> Iterator[Site]:
        t = self.tables.stream_rows
        if t is None:
            return
        args = [BUCKET, MEMORY, PAYLOAD, t.rows, t.guesses, RATIO, t.long_rows, len(t.rows)]
        file, threads = "stream_rows.cu", WARP * STREAM_WARPS
        yield self._memory_site(file, "stream_rows", t.blocks, threads, args)

    def _row_sites(self) -> Iterator[Site]:
        for launch in self.tables.encode_rows:
            yield self._memory_site(
                "encode_rows.cu",
                "encode_rows",
                len(launch.parts),
                WARP * launch.team,
                [BUCKET, MEMORY, PAYLOAD, launch.rows, launch.parts, launch.guesses, RATIO],
                TEAM=launch.team,
                SHAPES=launch.shapes,
            )

    def _column_sites(self) -> Iterator[Site]:
        """The steps of encode_columns.cu."""
        t = self.tables.encode_columns
        if t is None:
            return
        collected = [BUCKET, MEMORY, PAYLOAD, t.fields, t.cuts, t.masks, RATIO]
        sent = [MEMORY, PAYLOAD, t.columns, t.masks, t.guesses, t.cuts, RATIO]
        file = "encode_columns.cu"
        yield self._memory_site(file, "columns_collect", len(t.fields), COLLECT_THREADS, collected)
        yield self._memory_site(file, "columns_send", len(t.columns), SEND_THREADS, sent)

    def _giant_sites(self) -> Iterator[Site]:
        """The steps that encode_giants.cu names."""
        t = self.tables.encode_giants
        if t is None:
            return
        file, chunks = "encode_giants.cu", len(t.chunks)
        lists = [t.list_values, t.list_places]
        counted = [t.giants, t.sections, t.histograms, *lists]
        read = [BUCKET, MEMORY, PAYLOAD, t.chunks, *counted, RATIO]
        yield self._memory_site(file, "giants_collect", chunks, CHUNK_THREADS, read)
        decide = self._kernel("decide_giants.cu", "giants_decide")
        known = [MEMORY, t.rows, t.chunks, t.groups, *counted, t.edges, RATIO]
        yield Site(decide, len(t.groups), BINS, known)
        sent = [MEMORY, PAYLOAD, t.rows, t.chunks, t.giants, t.sections, *lists, chunks]
        warps = -(-chunks // ROW_WARPS)
        yield self._memory_site(file, "giants_send", warps, WARP * ROW_WARPS, sent)

    def _give_back_site(self) -> Site:
        rows = self.tables.all_rows
        return self._memory_site(
            "settle.cu",
            "give_back",
            min(LOOK_BLOCKS, -(-len(rows) // ROW_WARPS)),
            WARP * ROW_WARPS,
            [MEMORY, PAYLOAD, rows, USED, BAD, UNUSED, len(rows)],
        )


class Poison:
    """Not-a-number everywhere in a bucket if a flag is up; no traffic if not."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        kernel = _whole("poison", dtype)
        self._sites = [
            (
                start * dtype.itemsize,
                Site(kernel, LOOK_BLOCKS, LOOK_THREADS, [BUCKET, BAD, count]),
            )
            for start, count in _parts(numel)
        ]

    def __call__(self, bucket_flat: Tensor, bad: Tensor) -> None:
        at, flag = bucket_flat.data_ptr(), bad.data_ptr()
        for offset, site in self._sites:
            site.launch({"bucket": at + offset, "bad": flag})


def look(flat: Tensor) -> Tensor:
    """bool []: an element is not finite."""
    bad = torch.zeros((), dtype=torch.bool, device=flat.device)
    kernel = _whole("look", flat.dtype)
    for start, count in _parts(flat.numel()):
        kernel((LOOK_BLOCKS, 1, 1), (LOOK_THREADS, 1, 1), [flat[start:], bad, count])
    return bad


def _whole(name: str, dtype: torch.dtype) -> Kernel:
    defines = (("VALUE_CODE", 0), ("GRADIENT_CODE", FLOAT_CODES[dtype]))
    return FusedTopK.compiler("settle.cu", name, defines)


def _parts(numel: int) -> list[tuple[int, int]]:
    """(start, elements) of every launch: the kernels count with 32 bits."""
    starts = range(0, numel, MOST_AT_ONCE)
    return [(start, min(MOST_AT_ONCE, numel - start)) for start in starts]
