"""FusedThreshold: selection by a threshold on CUDA. Memory, selection and packing of whole tensors are one pass.

Reference: `Residual`, `ThresholdSession`, `Codec` and `AllGather`, chained by `PartsRoute`. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import (
    BINS,
    CHUNK_ROOM,
    CHUNK_THREADS,
    Section,
    cut_chunks,
    make_lists,
)
from thinwire.kernels.cuda.chunks import DEFINES as CHUNK_DEFINES
from thinwire.kernels.cuda.decode_parts import DECODE_THREADS, PIECE, PIECE_DEFINES
from thinwire.kernels.cuda.launch import PreparedLaunch
from thinwire.kernels.cuda.prepared import (
    BAD,
    BEFORE,
    BUCKET,
    GATHERED,
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
from thinwire.kernels.cuda.register_rows import WARP
from thinwire.kernels.cuda.source import Defines
from thinwire.kernels.cuda.structs import (
    Row,
    declare,
    i32,
    layout_of,
    make_room,
    make_rows,
    make_table,
)
from thinwire.kernels.cuda.tables import index_places
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group
from thinwire.wire.codec import FIXED_WORDS, SLOT_WORDS, Codec
from thinwire.wire.floats import FloatCode

ENCODE = "encode_threshold.cu"
DECODE = "decode_counted.cu"
CANDIDATES_PER_ENTRY = 4
"""Room for the candidates of a slot, beside some to spare. A slot that has more goes round again."""
UNKNOWN = float("nan")
SlotGoal = declare("SlotGoal", (Row, "row"), (i32, "fewest target exact unused"))
"""encode_threshold.cu: a slot as one row, and how many of it are sent."""
SlotState = declare("SlotState", (i32, "first chunks list room"), (i32, "listed way wanted low"))
"""encode_threshold.cu. Python sets the first four fields, the kernels keep the others."""
SlotPiece = declare("SlotPiece", (i32, "slot start"))
"""decode_counted.cu: elements of a slot that one block decodes."""
ENCODE_DEFINES: Defines = (*CHUNK_DEFINES, *map(layout_of, (SlotGoal, SlotState)))
DECODE_DEFINES: Defines = (*PIECE_DEFINES, *map(layout_of, (SlotGoal, SlotPiece)))


@dataclass(frozen=True)
class Goal:
    """How many of a slot are sent: those that reach its threshold, but no more than its places. `target` if fewer than `fewest` do."""

    fewest: int
    target: int
    exact: bool
    """Whether the smallest that is sent becomes the slot's threshold."""


class ThresholdState:
    """What a group keeps from turn to turn, in whatever modes its slots are: thresholds, chunks, room to work in."""

    def __init__(self, group: Group, keeps: Sequence[int], world: int, tolerance: float) -> None:
        """`keeps` says how many entries each slot usually sends. A relative change of a threshold by `tolerance` is a drift of 1."""
        device = group.device
        states: list[dict[str, int]] = []
        chunks: list[Tensor] = []
        pieces: list[Tensor] = []
        first, listed, spare = 0, 0, toolchain_of(device).tuning.spare_candidates
        rows = describe_slots(group)
        for index, (slot, keep) in enumerate(zip(group.slots, keeps, strict=True)):
            cut = cut_chunks(rows[index : index + 1], index, CHUNK_ROOM)
            room = min(slot.numel, CANDIDATES_PER_ENTRY * keep + spare)
            states.append({"first": first, "chunks": len(cut), "list": listed, "room": room})
            chunks.append(cut)
            begins = torch.arange(0, slot.numel, PIECE)
            pieces.append(make_table(SlotPiece, slot=index, start=begins))
            first, listed = first + len(cut), listed + room
        self.slots = on_device(make_rows(SlotState, states), device)
        """struct SlotState"""
        self.chunks = on_device(torch.cat(chunks), device)
        """struct Chunk"""
        self.pieces = on_device(torch.cat(pieces), device)
        """struct SlotPiece"""
        self.sections = make_room(Section, first, device)
        self.list_values, self.list_places = make_lists(listed, device)
        self.histograms = torch.zeros(len(states), BINS, dtype=torch.int32, device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        """Whether a slot goes round again."""
        self.thresholds = torch.full((len(states),), UNKNOWN, device=device)
        self.threshold_views = list(self.thresholds.unbind())
        """One per slot, 0-dimensional. A session holds them as thresholds of its parameters."""
        self.world = world
        self.tolerance = torch.full((1,), tolerance, device=device)


class FusedThreshold(PreparedKernels):
    """Selection by a threshold; every slot is one row, and there is no momentum."""

    def __init__(
        self,
        group: Group,
        codec: Codec,
        state: ThresholdState,
        goals: Sequence[Goal],
        gradient_dtype: torch.dtype,
    ) -> None:
        super().__init__(group, codec, gradient_dtype, state.world)
        self._defines = (*self._defines, ("NOTE_WORDS", codec.note_words))
        self.state = state
        self.goals = on_device(describe_goals(group, codec, goals), group.device)
        """struct SlotGoal per slot"""
        self._slot_words: Tensor | None = None
        self._header = on_device(codec.fixed_header()[:FIXED_WORDS], group.device)
        self.prepare()

    def _new_buffer(self) -> Tensor:
        return torch.zeros(self.codec.nbytes, dtype=torch.uint8, device=self.group.device)

    # -- the launches -----------------------------------------------------------------------------------------

    def _encode_launches(self) -> Iterator[PreparedLaunch]:
        """The steps of encode_threshold.cu."""
        t, goals = self.state, self.goals
        count, slots = len(t.chunks), len(t.slots)
        lists = [t.list_values, t.list_places]
        few = min(self.toolchain.tuning.look_blocks, count)

        def launch(name: str, blocks: int, threads: int, args: list[Any]) -> PreparedLaunch:
            return self._launch(ENCODE, name, ENCODE_DEFINES, blocks, threads, args)

        def decide(again: int) -> PreparedLaunch:
            known = [MEMORY, PAYLOAD, goals, t.chunks, self._header, t.slots, t.sections]
            found = [t.list_values, t.histograms, t.thresholds, t.tolerance, t.flag, again]
            return launch("decide", slots, BINS, [*known, *found])

        name, args = self._collection()
        yield launch(name, count, CHUNK_THREADS, [*args, t.slots, t.sections, *lists])
        yield decide(again=0)
        recounted = [MEMORY, t.chunks, t.slots, t.histograms, t.flag, count]
        yield launch("recount", few, CHUNK_THREADS, recounted)
        yield launch("rebound", slots, BINS, [t.slots, t.histograms, t.flag])
        recollected = [MEMORY, PAYLOAD, t.chunks, t.slots, t.sections, *lists, t.flag, count]
        yield launch("recollect", few, CHUNK_THREADS, recollected)
        yield decide(again=1)
        sent = [MEMORY, PAYLOAD, goals, t.chunks, t.slots, t.sections, *lists, t.flag, count]
        yield launch("send_lists", -(-count // ROW_WARPS), WARP * ROW_WARPS, sent)

    def _collection(self) -> tuple[str, list[Any]]:
        """The kernel that lists candidates, and what it reads."""
        t = self.state
        read = [BUCKET, BEFORE, MEMORY, PAYLOAD, self.goals, t.chunks, t.thresholds, RATIO]
        return "collect", read

    def _decode_launches(self) -> Iterator[PreparedLaunch]:
        goals, pieces = self.goals, self.state.pieces
        verdict = [self.used, self._status]
        read = [GATHERED, self._header, goals, *verdict, self.world, STRIDE, len(goals)]
        yield self._decode_launch("read_counts", 1, read)
        written = [GATHERED, OUT, goals, pieces, *verdict, self._share, self.world, STRIDE]
        yield self._decode_launch("decode_counted", len(pieces), [*written, int(self.into_bucket)])

    def _give_back_launch(self) -> PreparedLaunch:
        longest = max(slot.numel for slot in self.group.slots)
        blocks = min(self.toolchain.tuning.look_blocks, -(-longest // DECODE_THREADS))
        args = [MEMORY, PAYLOAD, self.goals, USED, BAD, UNUSED, len(self.goals)]
        return self._decode_launch("give_back_counted", blocks, args)

    def _decode_launch(self, name: str, blocks: int, args: list[Any]) -> PreparedLaunch:
        return self._launch(DECODE, name, DECODE_DEFINES, blocks, DECODE_THREADS, args)

    # -- one step ---------------------------------------------------------------------------------------------

    def decode(self, gathered: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
        super().decode(gathered, out, sums)
        words = gathered.view(torch.int32)[:, FIXED_WORDS : self.codec.header_words]
        per_slot = SLOT_WORDS + self.codec.note_words
        self._slot_words = words.unflatten(1, (len(self.goals), per_slot))

    def take_slot_words(self) -> tuple[Tensor, Tensor]:
        """(counts int32 [world, slots], notes float32 [world, slots, note words]) of the headers just read. Gives them once."""
        words, self._slot_words = self._slot_words, None
        assert words is not None
        return words[..., 0], words[..., SLOT_WORDS:].view(torch.float32)


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """A copy for index the host does not wait: modes change, and with them tables, in the middle of training."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def describe_slots(group: Group) -> Tensor:
    """struct Row of every slot as one row, as far as the group alone tells."""
    return make_table(
        Row,
        gradient=[source.offset for source in group.sources],
        memory=[slot.offset for slot in group.slots],
        length=[slot.numel for slot in group.slots],
        stride=1,
        slot=range(len(group.slots)),
    )


def describe_goals(group: Group, codec: Codec, goals: Sequence[Goal]) -> Tensor:
    """struct SlotGoal of every slot."""
    slots = codec.table.rows
    assert isinstance(codec.values, FloatCode)
    assert all(rows.count == 1 and rows.length == rows.slot.numel for rows in slots)
    item, places = codec.values.dtype.itemsize, index_places(codec)
    rows = make_table(
        Row,
        gradient=[source.offset for source in group.sources],
        memory=[rows.slot.offset for rows in slots],
        values=[codec.values_at + start * item for start in codec.table.entry_starts[:-1]],
        indices=[first for first, _ in places],
        length=[rows.length for rows in slots],
        keep=[rows.keep for rows in slots],
        stride=1,
        slot=range(len(slots)),
        width=[width for _, width in places],
    )
    fewest = [goal.fewest for goal in goals]
    targets = [goal.target for goal in goals]
    exact = [int(goal.exact) for goal in goals]
    return make_table(SlotGoal, row=rows, fewest=fewest, target=targets, exact=exact)
