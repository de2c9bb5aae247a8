"""Fused threshold selection on CUDA: memory, selection and packing of whole tensors in one pass, decoding by counts.

References: `Residual`, `ThresholdSession`, `Codec` and `AllGatherFast` chained by `SparseCompressor`, whose bits these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.decode_parts import PIECE
from thinwire.kernels.cuda.giants import BINS, check_listed
from thinwire.kernels.cuda.launch import Site
from thinwire.kernels.cuda.prepared import (
    BAD,
    BUCKET,
    GATHERED,
    LOOK_BLOCKS,
    MEMORY,
    OUT,
    PAYLOAD,
    RATIO,
    ROW_WARPS,
    STRIDE,
    UNUSED,
    USED,
    PreparedKernels,
)
from thinwire.kernels.cuda.tables import WARP, index_places
from thinwire.plan.groups import Group
from thinwire.wire.codec import FIXED_WORDS, SLOT_WORDS, Codec
from thinwire.wire.floats import FloatCode

DECODE = "decode_counted.cu"
THREADS = 256
CHUNK = 8192
"""Elements that one block collects from."""
CANDIDATES_PER_ENTRY = 4
SPARE_CANDIDATES = 1024
"""Room for the candidates of a slot; one that has more goes round again."""
UNKNOWN = float("nan")


@dataclass(frozen=True)
class Goal:
    """How many of a slot are sent: those that reach its threshold, at most its places; `target` if fewer than `fewest` do."""

    fewest: int
    target: int
    exact: bool
    """Whether the smallest that is sent becomes the slot's threshold."""


class Board:
    """What one group needs in every turn, whatever the mode of its slots: thresholds, chunks, room to work in."""

    def __init__(self, group: Group, keeps: Sequence[int], world: int, tolerance: float) -> None:
        """`keeps`: how many entries each slot usually sends; `tolerance`: the relative change of a threshold that counts as 1."""
        device = group.device
        slots: list[list[int]] = []
        chunks: list[list[int]] = []
        pieces: list[list[int]] = []
        listed = 0
        for which, (slot, keep) in enumerate(zip(group.slots, keeps, strict=True)):
            starts = range(0, slot.numel, CHUNK)
            room = min(slot.numel, CANDIDATES_PER_ENTRY * keep + SPARE_CANDIDATES)
            slots.append([len(chunks), len(starts), listed, room, *[0] * 6])
            chunks += [[which, start] for start in starts]
            pieces += [[which, start] for start in range(0, slot.numel, PIECE)]
            listed += room
        check_listed(listed)

        def table(rows: list[list[int]]) -> Tensor:
            return on_device(torch.tensor(rows, dtype=torch.int32), device)

        def room_for(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.slots = table(slots)
        """int32 [slots, 10]: struct Slot."""
        self.chunks = table(chunks)
        """int32 [chunks, 2]: struct Chunk."""
        self.pieces = table(pieces)
        """int32 [pieces, 2]: struct Piece."""
        self.sections = room_for(len(chunks), 4)
        """struct Section"""
        self.list_bits = room_for(listed)
        self.list_index = room_for(listed)
        self.histograms = room_for(len(slots), BINS)
        self.flag = room_for(1)
        """Whether a slot goes round again."""
        self.thresholds = torch.full((len(slots),), UNKNOWN, device=device)
        self.threshold_views = list(self.thresholds.unbind())
        """0-dimensional, one per slot: what a session holds as the threshold of a parameter."""
        self.world = world
        self.tolerance = torch.full((1,), tolerance, device=device)


class FusedThreshold(PreparedKernels):
    """Selection by a threshold; every slot is one row, and there is no momentum."""

    def __init__(
        self,
        group: Group,
        codec: Codec,
        board: Board,
        goals: Sequence[Goal],
        gradient_dtype: torch.dtype,
    ) -> None:
        super().__init__(group, codec, gradient_dtype, board.world, NOTE_WORDS=codec.note_words)
        self.board = board
        aims = torch.tensor(describe(group, codec, goals), dtype=torch.int64)
        self._aims = on_device(aims, group.device)
        self._slot_words: Tensor | None = None
        self._header = on_device(codec.fixed_header()[:FIXED_WORDS], group.device)
        self._prepare()

    def _new_buffer(self) -> Tensor:
        return torch.zeros(self.codec.nbytes, dtype=torch.uint8, device=self.group.device)

    # -- the launches -----------------------------------------------------------------------------------------

    def _encode_sites(self) -> Iterator[Site]:
        """The steps of encode_threshold.cu."""
        b, aims = self.board, self._aims
        chunks, slots = len(b.chunks), len(b.slots)
        lists = [b.list_bits, b.list_index]
        file = "encode_threshold.cu"

        def site(name: str, blocks: int, threads: int, args: list[Any]) -> Site:
            return Site(self._kernel(file, name), blocks, threads, args)

        def decide(again: int) -> Site:
            known = [MEMORY, PAYLOAD, aims, self._header, b.slots, b.sections, b.list_bits]
            found = [b.histograms, b.thresholds, b.tolerance, b.flag, again]
            return site("decide", slots, BINS, [*known, *found])

        read = [BUCKET, MEMORY, PAYLOAD, aims, b.chunks, b.thresholds, RATIO]
        yield site("collect", chunks, THREADS, [*read, b.slots, b.sections, *lists])
        yield decide(again=0)
        few = min(LOOK_BLOCKS, chunks)
        held = [MEMORY, aims, b.chunks, b.slots]
        yield site("recount", few, THREADS, [*held, b.histograms, b.flag, chunks])
        yield site("rebound", slots, BINS, [b.slots, b.histograms, b.flag])
        yield site("recollect", few, THREADS, [*held, b.sections, *lists, b.flag, chunks])
        yield decide(again=1)
        warps = -(-chunks // ROW_WARPS)
        sent = [MEMORY, PAYLOAD, aims, b.chunks, b.slots, b.sections, *lists, b.flag, chunks]
        yield site("send_lists", warps, WARP * ROW_WARPS, sent)

    def _decode_sites(self) -> Iterator[Site]:
        b, slots = self.board, len(self._aims)
        verdict = [self.used, self._status]
        read = [GATHERED, self._header, self._aims, *verdict, self.world, STRIDE, slots]
        yield Site(self._kernel(DECODE, "read_counts"), 1, THREADS, read)
        written = [GATHERED, OUT, self._aims, b.pieces, *verdict, self._share, self.world, STRIDE]
        bucket = int(self.into_bucket)
        yield Site(
            self._kernel(DECODE, "decode_counted"),
            len(b.pieces),
            THREADS,
            [*written, bucket],
        )

    def _give_back_site(self) -> Site:
        most = max(rows.keep for rows in self.codec.table.rows)
        blocks = min(LOOK_BLOCKS, -(-most // THREADS))
        args = [MEMORY, PAYLOAD, self._aims, USED, BAD, UNUSED, len(self._aims)]
        return Site(self._kernel(DECODE, "give_back_counted"), blocks, THREADS, args)

    # -- one step ---------------------------------------------------------------------------------------------

    def decode(self, gathered: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
        super().decode(gathered, out, sums)
        words = gathered.view(torch.int32)[:, FIXED_WORDS : self.codec.header_words]
        per_slot = SLOT_WORDS + self.codec.note_words
        self._slot_words = words.unflatten(1, (len(self._aims), per_slot))

    def take_slot_words(self) -> tuple[Tensor, Tensor]:
        """What all ranks said of each slot in the headers just read, once.

        (counts int32 [world, slots], notes float32 [world, slots, note words])
        """
        words, self._slot_words = self._slot_words, None
        assert words is not None
        return words[..., 0], words[..., SLOT_WORDS:].view(torch.float32)


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """A copy for which the host does not wait: modes change, and with them tables, in the middle of training."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def describe(group: Group, codec: Codec, goals: Sequence[Goal]) -> list[list[int]]:
    """64-bit words of struct Aim for every slot, two 32-bit numbers to a word.

    Plain numbers, because every new mixture of modes in a group makes a table.
    """
    assert isinstance(codec.values, FloatCode)
    places = index_places(codec)
    aims = []
    for which, (source, rows, goal) in enumerate(
        zip(group.sources, codec.table.rows, goals, strict=True)
    ):
        assert rows.count == 1 and rows.length == rows.slot.numel
        first_index, width = places[which]
        vector = int(source.offset % 4 == 0 and rows.slot.offset % 4 == 0)
        aims.append(
            [
                source.offset,
                rows.slot.offset,
                codec.values_at + codec.table.entry_starts[which] * codec.values.dtype.itemsize,
                first_index,
                rows.length | rows.keep << 32,
                1 | which << 32,
                width | vector << 32,
                1,
                goal.fewest | goal.target << 32,
                int(goal.exact),
            ]
        )
    return aims
