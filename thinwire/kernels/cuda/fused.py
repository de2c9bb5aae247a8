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

from thinwire.kernels.cuda.launch import Compiler, Kernel, Site, Varying, compile_with_nvrtc
from thinwire.kernels.cuda.tables import BINS, WARP, Tables, make_tables
from thinwire.plan.groups import Group
from thinwire.wire.codec import Codec
from thinwire.wire.fixed import PackedCode

FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROW_WARPS = 4
"""Rows per block where one warp has a whole row."""
TILE_THREADS = 1024
PIECE_THREADS = 256
COUNT_THREADS = 512
HEADER_THREADS = 256
LOOK_BLOCKS = 256
"""Blocks of a kernel that usually only looks at a flag."""
MOST_AT_ONCE = 1 << 30
"""Elements of a bucket in one launch."""
MOMENTUM_NAMES = ("u", "kept", "u_ratio")
BUCKET, MEMORY, PAYLOAD, RATIO = map(Varying, ("bucket", "memory", "payload", "ratio"))
GATHERED, OUT, STRIDE = map(Varying, ("gathered", "out", "stride"))
USED, FLAG = map(Varying, ("used", "flag"))


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
            ("PACKED", int(isinstance(codec.indices, PackedCode))),
        )
        self._correction = correction
        self._one = torch.ones(1, device=group.device)
        self._share = torch.full((1,), 1 / world, device=group.device)
        slots = len(codec.table.rows)
        self.every_slot = torch.ones(slots, dtype=torch.uint8, device=group.device)
        self.used = torch.zeros(slots, dtype=torch.uint8, device=group.device)
        """uint8 [slots]: anybody had a gradient in the last step that was decoded."""
        self._status = torch.zeros(2, dtype=torch.bool, device=group.device)
        self.wrong, self.unused = self._status.unbind()
        """bool []: something was wrong in that step; some slot had no gradient."""
        self._encode_sites = [*self._row_sites(), *self._tile_sites(), *self._giant_sites()]
        self._decode_sites = [self._header_site(), *self._decode_row_sites()]
        self._give_back_sites = {
            of_used: self._give_back_site(of_used) for of_used in (True, False)
        }

    def _kernel(self, file: str, name: str, **more: int) -> Kernel:
        return self.compiler(file, name, (*self._defines, *more.items()))

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
            count = len(launch.rows)
            per_block = max(launch.columns, ROW_WARPS if launch.warps == 1 else 1)
            yield self._memory_site(
                "encode_rows.cu",
                "encode_rows",
                -(-count // per_block),
                WARP * launch.warps * per_block,
                [BUCKET, MEMORY, PAYLOAD, launch.rows, launch.guesses, RATIO, count],
                launch.shared_bytes,
                WARPS=launch.warps,
                ELEMENTS=launch.elements,
                COLUMNS=launch.columns,
            )

    def _tile_sites(self) -> Iterator[Site]:
        for tile in self.tables.encode_tiles:
            yield self._memory_site(
                "encode_tiles.cu",
                "encode_tiles",
                len(tile.parts),
                TILE_THREADS,
                [BUCKET, MEMORY, PAYLOAD, tile.rows, tile.parts, RATIO, tile.words],
                4 * tile.fibres * max(BINS, tile.words),
                FIBRES=tile.fibres,
            )

    def _giant_sites(self) -> Iterator[Site]:
        """The steps of encode_giants.cu."""
        t = self.tables.encode_giants
        if t is None:
            return
        chunks, rows = len(t.chunks), len(t.rows)
        warps = -(-chunks // ROW_WARPS)
        per_chunk = [t.rows, t.chunks, t.giants, t.starts]
        file = "encode_giants.cu"

        def site(name: str, blocks: int, threads: int, args: list[Any]) -> Site:
            return Site(self._kernel(file, name), blocks, threads, args)

        counted = [BUCKET, MEMORY, PAYLOAD, t.rows, t.chunks, t.giants, t.histograms, RATIO]
        yield self._memory_site(file, "giants_count", chunks, COUNT_THREADS, counted)
        bounded = [t.rows, t.first_chunks, t.giants, t.histograms, t.starts]
        yield site("giants_bound", rows, BINS, bounded)
        collected = [MEMORY, *per_chunk, t.list_bits, t.list_index]
        yield site("giants_collect", chunks, COUNT_THREADS, collected)
        yield site("giants_search", rows, BINS, [t.rows, t.giants, t.list_bits])
        tallied = [*per_chunk, t.list_bits, t.tallies, chunks]
        yield site("giants_tally", warps, WARP * ROW_WARPS, tallied)
        yield site("giants_place", rows, BINS, [t.first_chunks, t.giants, t.tallies])
        sent = [MEMORY, PAYLOAD, *per_chunk, t.list_bits, t.list_index, t.tallies, chunks]
        yield self._memory_site(file, "giants_send", warps, WARP * ROW_WARPS, sent)
        left = [MEMORY, PAYLOAD, t.rows, t.giants]
        yield self._memory_site(file, "giants_fallback", rows, BINS, left)

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

    # -- one step ---------------------------------------------------------------------------------------------

    def open_momentum(self, u: Tensor, ratio: Tensor | None) -> list[Tensor]:
        """What `encode` and `give_back` of one step need to know of a momentum that is to be multiplied with `ratio` first."""
        assert self._correction is not None
        entries = self.codec.table.entries if self._correction.masking else 0
        kept = torch.empty(entries, device=u.device)
        return [u, kept, self._one if ratio is None else ratio]

    def encode(
        self,
        bucket_flat: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Tensor] = (),
    ) -> Tensor:
        """The payload; `memory` (the residual times `ratio`, plus the gradient or momentum) keeps what is not in it."""
        payload = self.tables.template.clone()
        values = {
            "bucket": bucket_flat,
            "memory": memory,
            "payload": payload,
            "ratio": self._one if ratio is None else ratio,
            **dict(zip(MOMENTUM_NAMES, momentum, strict=False)),
        }
        for site in self._encode_sites:
            site.launch(values)
        return payload

    def decode(self, gathered: Tensor, out: Tensor) -> None:
        """Write the mean of all ranks' entries to `out` (bucket or group layout); sets `used`, `unused` and `wrong`."""
        values: dict[str, Tensor | int] = {
            "gathered": gathered,
            "out": out,
            "stride": gathered.stride(0),
        }
        for site in self._decode_sites:
            site.launch(values)

    def give_back(
        self,
        memory: Tensor,
        payload: Tensor,
        used: Tensor,
        flag: Tensor,
        of_used: bool,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        """If the flag (a byte) is up: the payload's entries of the used (or of the unused) slots return to memory."""
        values = {
            "memory": memory,
            "payload": payload,
            "used": used,
            "flag": flag,
            **dict(zip(MOMENTUM_NAMES, momentum, strict=False)),
        }
        self._give_back_sites[of_used].launch(values)


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
