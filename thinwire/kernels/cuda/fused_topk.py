"""FusedTopK: exact top-k on CUDA. Memory, selection and packing are one pass; decoding the entries of all ranks is another.

Reference: `Residual`, `MomentumCorrection` or `AdamMomentum`, `ExactTopK`, `Codec` and `AllGather`, chained by `PartsRoute`. The
bits are the same.

Bytes per element that a step has to move, beside entries: 16 (gradient, residual read and written, update), with momentum 8 more, and
in Adam's scale another 4 (second moment). The kernels move just these: what selection compares in a scale is never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.kernels.cuda import chunks, columns, decode_parts, dense, multi_block_rows, rows
from thinwire.kernels.cuda.joint import Joint, JointKernel, joint_kernel
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying
from thinwire.kernels.cuda.prepared import (
    BAD,
    BEFORE,
    BUCKET,
    DENSE,
    GATHERED,
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
from thinwire.kernels.cuda.quantize import LOSS_SCALE, SECOND_MOMENT, Scaling
from thinwire.kernels.cuda.register_rows import WARP
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import declare, i64, layout_of, pointer
from thinwire.kernels.cuda.tables import FusedTables, make_tables
from thinwire.layout import Group
from thinwire.wire.codec import Codec

QUAD = 16
"""Bytes of a payload that one thread clears."""
MOST_RECORDS = 60
"""Payloads that one launch settles."""
PayloadRecord = declare(
    "PayloadRecord",
    (pointer, "memory payload rows used unused"),
    (i64, "count"),
    (pointer, "momentum kept"),
)
"""settle.cu: what one bucket may have to take back. Tensors must outlive the launch."""
SETTLE_DEFINES: Defines = (("MOST_RECORDS", MOST_RECORDS), layout_of(PayloadRecord))


class MomentumStep(Protocol):
    """How momentum comes before selection, as the kernels know it (momentum.cuh)."""

    @property
    def masking(self) -> bool: ...

    @property
    def defines(self) -> Defines: ...

    def parameters(self, kept: Tensor) -> list[Any]:
        """MOMENTUM_PARAMETERS."""


@dataclass(frozen=True)
class Correction:
    """Momentum correction."""

    momentum: float
    nesterov: bool
    masking: bool

    @property
    def defines(self) -> Defines:
        kind = (("NESTEROV", int(self.nesterov)), ("MASKING", int(self.masking)))
        return (("MOMENTUM", 1), *kind)

    def parameters(self, kept: Tensor) -> list[Any]:
        """MOMENTUM_PARAMETERS."""
        before, u, ratio = map(Varying, MOMENTUM_NAMES)
        return [before, u, kept, ratio, self.momentum]


@dataclass(frozen=True)
class ScaledStep:
    """Adam's momentum, and selection in Adam's scale."""

    scaling: Scaling
    collected: bool = False
    """Whether momentum and residual are in memory already."""
    masking = False

    @property
    def defines(self) -> Defines:
        kind = (("SCALED", 1), ("COLLECTED", int(self.collected)))
        return (("MOMENTUM", 1), ("NESTEROV", 0), ("MASKING", 0), *kind)

    def parameters(self, kept: Tensor) -> list[Any]:
        """MOMENTUM_PARAMETERS."""
        beta, eps, limit = self.scaling.beta, self.scaling.eps, self.scaling.limit
        momentum = [*map(Varying, MOMENTUM_NAMES[:2]), kept, Varying(MOMENTUM_NAMES[2])]
        scale = [SECOND_MOMENT, float(eps), float(inf if limit is None else limit), LOSS_SCALE]
        return [*momentum, float(beta), float(1 - beta), *scale]


class FusedTopK(PreparedKernels):
    """Exact top-k, with the memory or the momentum that `correction` says, perhaps in a scale.

    `dense_companion` is a group of float32 slots of the same bucket that travels whole. It lies before the payload in the same
    buffer and shares its launches. It is gathered with the payload, or `summed` by itself.
    """

    def __init__(
        self,
        group: Group,
        codec: Codec,
        gradient_dtype: torch.dtype,
        world: int,
        correction: MomentumStep | None = None,
        dense_companion: Group | None = None,
        summed: bool = False,
    ) -> None:
        super().__init__(group, codec, gradient_dtype, world)
        self.summed = summed
        self._stretches = torch.zeros(0, dtype=torch.int32, device=group.device)
        if dense_companion is not None:
            assert gradient_dtype == torch.float32
            self.dense_prefix = dense.packed_bytes(dense_companion)
            self._stretches = dense.cut_stretches(dense_companion)
        self.tables: FusedTables = make_tables(group, codec, self.toolchain.tuning)
        self._correction = correction
        masks = correction is not None and correction.masking
        self._kept = torch.zeros(codec.table.entries if masks else 0, device=group.device)
        """What the momentum was at every entry that was masked in the last step."""
        self._rows_at = self.tables.all_rows.data_ptr()
        self._row_count = len(self.tables.all_rows)
        self._kept_at = self._kept.data_ptr()
        self.prepare()
        defines = (*self._defines, *self._momentum_defines, *SETTLE_DEFINES)
        give_back_all = ("settle.cu", "give_back_all", defines, PayloadRecord, MOST_RECORDS)
        self._joint: JointKernel = joint_kernel(self.toolchain, *give_back_all, group.device)

    def _new_buffer(self) -> Tensor:
        size = self.dense_prefix + self.codec.nbytes
        return torch.empty(size, dtype=torch.uint8, device=self.group.device)

    def joint_entry(
        self,
        memory: Tensor,
        sent: Tensor,
        used: Tensor,
        unused: Tensor,
        momentum: Sequence[Tensor] = (),
    ) -> Joint | None:
        record = PayloadRecord(
            memory.data_ptr(),
            sent.data_ptr() + self.dense_prefix,
            self._rows_at,
            used.data_ptr(),
            unused.data_ptr(),
            self._row_count,
            momentum[1].data_ptr() if momentum else None,
            self._kept_at,
        )
        return self._joint, record

    # -- the launches -----------------------------------------------------------------------------------------

    def _encode_launches(self) -> Iterator[PreparedLaunch]:
        yield self._opening_launch()
        yield from self._streamed_launches()
        yield from self._register_launches()
        yield from self._column_launches()
        yield from self._multi_block_launches()

    def _opening_launch(self) -> PreparedLaunch:
        quads, stretches = self.codec.nbytes // QUAD, self._stretches
        copying = -(-quads // dense.THREADS)
        read = [self.tables.template, PAYLOAD, BUCKET, DENSE, stretches]
        args = [*read, self._status, quads, copying, self.world]
        source = ("dense.cu", "open_payload", dense.STRETCH_DEFINES)
        return self._launch(*source, copying + len(stretches), dense.THREADS, args)

    def _decode_launches(self) -> Iterator[PreparedLaunch]:
        t, slots = self.tables, self.codec.table.rows
        parts = decode_parts.decode_parts(slots, t.all_rows, len(self._stretches))
        read = [GATHERED, DENSE, OUT, t.all_rows, parts, self._stretches, t.expected]
        dense_rows = 1 if self.summed else self.world
        known = [self.used, self._status, self._share, self.world, dense_rows, STRIDE, len(slots)]
        source = ("decode.cu", "decode", (*decode_parts.DEFINES, *dense.STRETCH_DEFINES))
        args = [*read, *known, int(self.into_bucket)]
        yield self._launch(*source, len(parts), decode_parts.DECODE_THREADS, args)

    @property
    def _momentum_defines(self) -> Defines:
        return () if self._correction is None else self._correction.defines

    def _memory_launch(
        self, file: str, name: str, defines: Defines, blocks: int, threads: int, args: Sequence[Any]
    ) -> PreparedLaunch:
        """Of a kernel that knows of momentum."""
        correction = self._correction
        parameters = [] if correction is None else correction.parameters(self._kept)
        source = (file, name, (*self._momentum_defines, *defines))
        return self._launch(*source, blocks, threads, [*args, *parameters])

    def _streamed_launches(self) -> Iterator[PreparedLaunch]:
        t = self.tables.streamed_rows
        if t is None:
            return
        args = [BUCKET, BEFORE, MEMORY, PAYLOAD, t.rows, t.guesses, RATIO, t.long_rows, len(t.rows)]
        source, threads = ("stream_rows.cu", "stream_rows", rows.DEFINES), WARP * rows.STREAM_WARPS
        yield self._memory_launch(*source, t.blocks, threads, args)

    def _register_launches(self) -> Iterator[PreparedLaunch]:
        for t in self.tables.register_rows:
            source = ("encode_rows.cu", "encode_rows", t.defines)
            args = [BUCKET, BEFORE, MEMORY, PAYLOAD, t.rows, t.blocks, t.guesses, RATIO]
            yield self._memory_launch(*source, len(t.blocks), WARP * t.warps, args)

    def _column_launches(self) -> Iterator[PreparedLaunch]:
        """The steps of encode_columns.cu."""
        t = self.tables.columns
        if t is None:
            return

        def launch(name: str, blocks: int, threads: int, args: list[Any]) -> PreparedLaunch:
            source = ("encode_columns.cu", name, columns.DEFINES)
            return self._memory_launch(*source, blocks, threads, args)

        collected = [BUCKET, BEFORE, MEMORY, PAYLOAD, t.blocks, t.cuts, t.masks, RATIO]
        yield launch("columns_collect", len(t.blocks), columns.COLLECT_THREADS, collected)
        sent = [MEMORY, PAYLOAD, t.columns, t.masks, t.guesses, t.cuts, RATIO]
        yield launch("columns_send", len(t.columns), columns.SEND_THREADS, sent)

    def _multi_block_launches(self) -> Iterator[PreparedLaunch]:
        """The steps that encode_multi_block_rows.cu names."""
        t = self.tables.multi_block_rows
        if t is None:
            return
        defines, count = multi_block_rows.DEFINES, len(t.chunks)

        def launch(name: str, blocks: int, threads: int, args: list[Any]) -> PreparedLaunch:
            source = ("encode_multi_block_rows.cu", name, defines)
            return self._memory_launch(*source, blocks, threads, args)

        lists = [t.list_values, t.list_places]
        counted = [t.row_states, t.sections, t.histograms, *lists]
        read = [BUCKET, BEFORE, MEMORY, PAYLOAD, t.chunks, *counted, RATIO]
        yield launch("multi_block_collect", count, chunks.CHUNK_THREADS, read)
        decide = ("decide_multi_block_rows.cu", "multi_block_decide", defines)
        known = [MEMORY, t.rows, t.chunks, t.groups, *counted, t.edges, RATIO]
        yield self._memory_launch(*decide, len(t.groups), chunks.BINS, known)
        sent = [MEMORY, PAYLOAD, t.rows, t.chunks, t.row_states, t.sections, *lists, count]
        yield launch("multi_block_send", -(-count // ROW_WARPS), WARP * ROW_WARPS, sent)

    def _give_back_launch(self) -> PreparedLaunch:
        table = self.tables.all_rows
        blocks = min(self.toolchain.tuning.look_blocks, -(-len(table) // ROW_WARPS))
        args = [MEMORY, PAYLOAD, table, USED, BAD, UNUSED, len(table)]
        source = ("settle.cu", "give_back", SETTLE_DEFINES)
        return self._memory_launch(*source, blocks, WARP * ROW_WARPS, args)
