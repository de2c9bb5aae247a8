"""Fused top-k on CUDA: memory, selection and packing in one pass, all ranks' entries to a gradient in another.

References: `Residual` or `MomentumCorrection`, `ExactTopK`, `Codec` and `AllGatherFast` chained by `SparseCompressor`, whose bits
these are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Compiler, Kernel, compile_with_nvrtc
from thinwire.kernels.cuda.tables import BINS, WARP, GiantLaunch, Tables, make_tables
from thinwire.plan.groups import Group
from thinwire.wire.codec import Codec

FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROW_WARPS = 4
"""Rows per block where one warp has a whole row."""
TILE_THREADS = 1024
PIECE_THREADS = 256
COUNT_THREADS = 512
LOOK_BLOCKS = 256
"""Blocks of a kernel that usually only looks at a flag."""


@dataclass(frozen=True)
class Correction:
    """Momentum correction as the kernels know it (momentum.cuh)."""

    momentum: float
    nesterov: bool
    masking: bool

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return ("MOMENTUM", 2 if self.nesterov else 1), ("MASKING", int(self.masking))

    def arguments(self, u: Tensor, kept: Tensor, ratio: Tensor) -> list[Any]:
        """MOMENTUM_PARAMETERS; numbers travel as integers, so the momentum goes by its bits."""
        (bits,) = struct.unpack("i", struct.pack("f", self.momentum))
        return [u, kept, ratio, bits]


class FusedTopK:
    """The kernels of one codec on one group; buffers that shapes fix are made once."""

    compiler: Compiler = staticmethod(compile_with_nvrtc)

    def __init__(
        self,
        group: Group,
        codec: Codec,
        gradient_dtype: torch.dtype,
        world: int,
        correction: Correction | None = None,
    ) -> None:
        self.codec = codec
        self.group = group
        self.tables: Tables = make_tables(group, codec)
        self.world = world
        self.into_bucket = gradient_dtype == torch.float32
        """Whether decoding writes the bucket itself; a narrower one needs the exact update for its rounding."""
        values = getattr(codec.values, "dtype", torch.float32)
        self._defines = (
            ("VALUE_CODE", FLOAT_CODES[values]),
            ("GRADIENT_CODE", FLOAT_CODES[gradient_dtype]),
        )
        self._correction = correction
        self._one = torch.ones(1, device=group.device)
        self._share = torch.full((1,), 1 / world, device=group.device)
        self.every_slot = torch.ones(len(codec.table.rows), dtype=torch.uint8, device=group.device)

    def _kernel(self, file: str, name: str, **more: int) -> Kernel:
        return self.compiler(file, name, (*self._defines, *more.items()))

    def _memory_kernel(self, file: str, name: str, **more: int) -> Kernel:
        """One that knows of momentum."""
        corrected = () if self._correction is None else self._correction.defines
        return self.compiler(file, name, (*self._defines, *corrected, *more.items()))

    def open_momentum(self, u: Tensor, ratio: Tensor | None) -> list[Any]:
        """What `encode` and `give_back` of one step need to know of a momentum that is to be multiplied with `ratio` first."""
        assert self._correction is not None
        entries = self.codec.table.entries if self._correction.masking else 0
        kept = torch.empty(entries, device=u.device)
        return self._correction.arguments(u, kept, self._one if ratio is None else ratio)

    def encode(
        self,
        bucket_flat: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Any] = (),
    ) -> Tensor:
        """The payload; `memory` (the residual times `ratio`, plus the gradient or momentum) keeps what is not in it."""
        payload = self.tables.template.clone()
        scale = self._one if ratio is None else ratio
        for launch in self.tables.encode_rows:
            kernel = self._memory_kernel(
                "encode_rows.cu",
                "encode_rows",
                WARPS=launch.warps,
                ELEMENTS=launch.elements,
                COLUMNS=launch.columns,
            )
            count = len(launch.rows)
            per_block = max(launch.columns, ROW_WARPS if launch.warps == 1 else 1)
            kernel(
                (-(-count // per_block), 1, 1),
                (WARP * launch.warps * per_block, 1, 1),
                [
                    *(bucket_flat, memory, payload, launch.rows, launch.guesses, scale, count),
                    *momentum,
                ],
                shared_mem=launch.shared_bytes,
            )
        for tile in self.tables.encode_tiles:
            kernel = self._memory_kernel("encode_tiles.cu", "encode_tiles", FIBRES=tile.fibres)
            kernel(
                (len(tile.parts), 1, 1),
                (TILE_THREADS, 1, 1),
                [
                    *(bucket_flat, memory, payload, tile.rows, tile.parts, scale, tile.words),
                    *momentum,
                ],
                shared_mem=4 * tile.fibres * max(BINS, tile.words),
            )
        if self.tables.encode_giants is not None:
            self._encode_giants(
                self.tables.encode_giants, bucket_flat, memory, payload, scale, momentum
            )
        return payload

    def _encode_giants(
        self,
        t: GiantLaunch,
        bucket_flat: Tensor,
        memory: Tensor,
        payload: Tensor,
        scale: Tensor,
        momentum: Sequence[Any],
    ) -> None:
        """The steps of encode_giants.cu."""
        chunks, rows = len(t.chunks), len(t.rows)
        warps = -(-chunks // ROW_WARPS)
        per_chunk = [t.rows, t.chunks, t.giants, t.starts]

        def launch(name: str, blocks: int, threads: int, args: list[Any]) -> None:
            self._kernel("encode_giants.cu", name)((blocks, 1, 1), (threads, 1, 1), args)

        def launch_on_memory(name: str, blocks: int, threads: int, args: list[Any]) -> None:
            kernel = self._memory_kernel("encode_giants.cu", name)
            kernel((blocks, 1, 1), (threads, 1, 1), [*args, *momentum])

        launch_on_memory(
            "giants_count",
            chunks,
            COUNT_THREADS,
            [bucket_flat, memory, payload, t.rows, t.chunks, t.giants, t.histograms, scale],
        )
        launch(
            "giants_bound",
            rows,
            BINS,
            [t.rows, t.first_chunks, t.giants, t.histograms, t.starts],
        )
        launch(
            "giants_collect", chunks, COUNT_THREADS, [memory, *per_chunk, t.list_bits, t.list_index]
        )
        launch("giants_search", rows, BINS, [t.rows, t.giants, t.list_bits])
        launch(
            "giants_tally", warps, WARP * ROW_WARPS, [*per_chunk, t.list_bits, t.tallies, chunks]
        )
        launch("giants_place", rows, BINS, [t.first_chunks, t.giants, t.tallies])
        launch_on_memory(
            "giants_send",
            warps,
            WARP * ROW_WARPS,
            [memory, payload, *per_chunk, t.list_bits, t.list_index, t.tallies, chunks],
        )
        launch_on_memory("giants_fallback", rows, BINS, [memory, payload, t.rows, t.giants])

    def read_headers(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """(uint8 [slots]: anybody had a gradient; bool [2]: something is wrong, some slot is unused)."""
        slots = len(self.codec.table.rows)
        used = torch.empty(slots, dtype=torch.uint8, device=gathered.device)
        status = torch.zeros(2, dtype=torch.bool, device=gathered.device)
        self._kernel("decode.cu", "read_headers", FIBRES=1)(
            (1, 1, 1),
            (256, 1, 1),
            [
                gathered,
                self.tables.expected,
                used,
                status,
                self.world,
                gathered.stride(0) // 4,
                slots,
            ],
        )
        return used, status

    def decode(self, gathered: Tensor, out: Tensor, used: Tensor, status: Tensor) -> None:
        """Write the mean of all ranks' entries to `out` (bucket or group layout); raises status[0] if not finite."""
        sizes = [self.world, gathered.stride(0)]
        bucket = int(self.into_bucket)
        for launch in self.tables.decode_rows:
            count = len(launch.rows)
            self._kernel("decode.cu", "decode_rows", FIBRES=1)(
                (-(-count // ROW_WARPS), 1, 1),
                (WARP * ROW_WARPS, 1, 1),
                [
                    gathered,
                    out,
                    launch.rows,
                    used,
                    status,
                    self._share,
                    *sizes,
                    count,
                    launch.longest,
                    bucket,
                ],
                shared_mem=4 * ROW_WARPS * launch.longest,
            )
        for tile in self.tables.decode_tiles:
            self._kernel("decode.cu", "decode_tiles", FIBRES=tile.fibres)(
                (len(tile.parts), 1, 1),
                (PIECE_THREADS, 1, 1),
                [gathered, out, tile.rows, tile.parts, used, status, self._share, *sizes, bucket],
            )

    def give_back(
        self,
        memory: Tensor,
        payload: Tensor,
        used: Tensor,
        flag: Tensor,
        of_used: bool,
        momentum: Sequence[Any] = (),
    ) -> None:
        """If the flag (a byte) is up: the payload's entries of the used (or of the unused) slots return to memory."""
        rows = self.tables.all_rows
        self._memory_kernel("settle.cu", "give_back")(
            (min(LOOK_BLOCKS, -(-len(rows) // ROW_WARPS)), 1, 1),
            (WARP * ROW_WARPS, 1, 1),
            [memory, payload, rows, used, flag, len(rows), int(of_used), *momentum],
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
    FusedTopK.compiler("settle.cu", name, defines)(
        (LOOK_BLOCKS, 1, 1), (256, 1, 1), [flat, flag, flat.numel()]
    )
