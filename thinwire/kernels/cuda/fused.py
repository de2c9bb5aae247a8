"""Fused top-k on CUDA: memory, selection and packing in one pass, all ranks' entries to a gradient in another.

References: `Residual` or `MomentumCorrection`, `ExactTopK`, `Codec` and `AllGatherFast` chained by `SparseCompressor`, whose bits
these are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.columns import COLLECT_THREADS, SEND_THREADS
from thinwire.kernels.cuda.launch import Site, Varying
from thinwire.kernels.cuda.prepared import (
    BUCKET,
    FLAG,
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
    USED,
    PreparedKernels,
)
from thinwire.kernels.cuda.tables import BINS, WARP, Tables, make_tables
from thinwire.plan.groups import Group
from thinwire.wire.codec import Codec

PIECE_THREADS = 256
CHUNK_THREADS = 256
HEADER_THREADS = 256
MOST_AT_ONCE = 1 << 30
"""Elements of a bucket in one launch."""


@dataclass(frozen=True)
class Correction:
    """Momentum correction as the kernels know it (momentum.cuh)."""

    momentum: float
    nesterov: bool
    masking: bool

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return ("MOMENTUM", 2 if self.nesterov else 1), ("MASKING", int(self.masking))

    @property
    def parameters(self) -> list[Any]:
        """MOMENTUM_PARAMETERS; numbers travel as integers, so the momentum goes by its bits."""
        (bits,) = struct.unpack("i", struct.pack("f", self.momentum))
        return [*map(Varying, MOMENTUM_NAMES), bits]


class FusedTopK(PreparedKernels):
    """Exact top-k, with the memory or the momentum that `correction` says."""

    def __init__(
        self,
        group: Group,
        codec: Codec,
        gradient_dtype: torch.dtype,
        world: int,
        correction: Correction | None = None,
    ) -> None:
        super().__init__(group, codec, gradient_dtype, world)
        self.tables: Tables = make_tables(group, codec)
        self._correction = correction
        self._prepare()

    def _new_payload(self) -> Tensor:
        return self.tables.template.clone()

    def open_momentum(self, u: Tensor, ratio: Tensor | None) -> list[Tensor]:
        """What `encode` and `give_back` of one step need to know of a momentum that is to be multiplied with `ratio` first."""
        assert self._correction is not None
        entries = self.codec.table.entries if self._correction.masking else 0
        kept = torch.empty(entries, device=u.device)
        return [u, kept, self._one if ratio is None else ratio]

    # -- the launches -----------------------------------------------------------------------------------------

    def _encode_sites(self) -> Iterator[Site]:
        yield from self._row_sites()
        yield from self._column_sites()
        yield from self._giant_sites()

    def _decode_sites(self) -> Iterator[Site]:
        yield self._header_site()
        yield from self._decode_row_sites()

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
        corrected = () if self._correction is None else self._correction.defines
        kernel = self.compiler(file, name, (*self._defines, *corrected, *more.items()))
        parameters = [] if self._correction is None else self._correction.parameters
        return Site(kernel, blocks, threads, [*args, *parameters], shared_mem)

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
        sent = [MEMORY, PAYLOAD, t.rows, t.parts, t.masks, t.guesses, t.cuts, RATIO]
        file = "encode_columns.cu"
        yield self._memory_site(file, "columns_collect", len(t.fields), COLLECT_THREADS, collected)
        yield self._memory_site(file, "columns_send", len(t.parts), SEND_THREADS, sent)

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

    def _header_site(self) -> Site:
        slots = len(self.codec.table.rows)
        known = [self.tables.expected, self.used, self._status]
        kernel = self._kernel("decode.cu", "read_headers", FIBRES=1)
        return Site(kernel, 1, HEADER_THREADS, [GATHERED, *known, self.world, STRIDE, slots])

    def _decode_row_sites(self) -> Iterator[Site]:
        bucket = int(self.into_bucket)
        known = [self.used, self._status, self._share, self.world, STRIDE]
        for launch in self.tables.decode_rows:
            count = len(launch.rows)
            yield Site(
                self._kernel("decode.cu", "decode_rows", FIBRES=1),
                -(-count // ROW_WARPS),
                WARP * ROW_WARPS,
                [GATHERED, OUT, launch.rows, *known, count, launch.longest, bucket],
                4 * ROW_WARPS * launch.longest,
            )
        for tile in self.tables.decode_tiles:
            yield Site(
                self._kernel("decode.cu", "decode_tiles", FIBRES=tile.fibres),
                len(tile.parts),
                PIECE_THREADS,
                [GATHERED, OUT, tile.rows, tile.parts, *known, bucket],
            )

    def _give_back_site(self, of_used: bool) -> Site:
        rows = self.tables.all_rows
        return self._memory_site(
            "settle.cu",
            "give_back",
            min(LOOK_BLOCKS, -(-len(rows) // ROW_WARPS)),
            WARP * ROW_WARPS,
            [MEMORY, PAYLOAD, rows, USED, FLAG, len(rows), int(of_used)],
        )


def poison(bucket_flat: Tensor, bad: Tensor) -> None:
    """Not-a-number everywhere if `bad`; no traffic if not."""
    _whole("poison", bucket_flat, bad)


def look(flat: Tensor) -> Tensor:
    """bool []: an element is not finite."""
    bad = torch.zeros((), dtype=torch.bool, device=flat.device)
    _whole("look", flat, bad)
    return bad


def _whole(name: str, flat: Tensor, flag: Tensor) -> None:
    defines = (("VALUE_CODE", 0), ("GRADIENT_CODE", FLOAT_CODES[flat.dtype]))
    kernel = FusedTopK.compiler("settle.cu", name, defines)
    # The kernels count with 32 bits.
    for part in flat.split(MOST_AT_ONCE):
        kernel((LOOK_BLOCKS, 1, 1), (256, 1, 1), [part, flag, part.numel()])
