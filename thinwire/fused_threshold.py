"""FusedTurns: memory -> select -> wire -> exchange as a few CUDA kernels, exact or by a reused threshold, turn by turn.

The same methods as `SparseCompressor` chains from their parts, with the same bits: `ExactTopK` by the kernels of `fused.py`,
`ThresholdTopK` and `FixedThreshold` by those of `kernels/cuda/threshold.py`, `Interleaved` by both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.exchange.base import Exchange, Outcome
from thinwire.exchange.requests import Place, Program
from thinwire.fused import FusedAccount, can_fuse, make_kernels, open_fused
from thinwire.kernels.cuda.fused import FusedTopK
from thinwire.kernels.cuda.threshold import Board, FusedThreshold, Goal
from thinwire.memory.base import MemoryState
from thinwire.memory.residual import ResidualState
from thinwire.plan.groups import Group
from thinwire.select.base import Session
from thinwire.select.finish import EstimateSession, TargetRows
from thinwire.select.interleave import ALL_DIMENSION, InterleavedSession
from thinwire.select.rows import RowTable, keep_count
from thinwire.select.threshold import EXACT, ThresholdSession
from thinwire.select.threshold_fixed import FixedThreshold
from thinwire.select.topk import TradTopK
from thinwire.wire.codec import Codec


def exact_turn(session: Session, modes: Sequence[Hashable]) -> Session:
    """The session that selects in this turn, for `can_fuse`: that of exact top-k where an interleaved one comes down to it."""
    if isinstance(session, InterleavedSession) and (
        isinstance(session.setting.globally, TradTopK)
        or all(mode == ALL_DIMENSION for mode in modes)
    ):
        return session.setting.dimensions.session()
    return session


@dataclass(frozen=True)
class ReusedTurn:
    """A turn of `ThresholdTopK`: every slot selects exactly and remembers its threshold, or reuses it."""

    session: ThresholdSession
    kinds: Sequence[str]

    def board(self, group: Group, table: RowTable, world: int) -> Board:
        setting = self.session.setting
        keeps = [keep_count(slot.numel, setting.density) for slot in group.slots]
        return Board(group, keeps, world, setting.monitor.tolerance)

    def goals(self, table: RowTable) -> list[Goal]:
        return [
            Goal(rows.keep, rows.keep, exact=True) if kind == EXACT else Goal(1, 1, exact=False)
            for rows, kind in zip(table.rows, self.kinds, strict=True)
        ]

    def aim(self, group: Group, board: Board) -> None:
        names = [slot.name for slot in group.slots]
        self.session.share_thresholds(names, board.threshold_views)

    def observe(self, table: RowTable, notes: Tensor, counts: Tensor) -> None:
        self.session.observe_slots(table, self.kinds, notes, counts)


@dataclass(frozen=True)
class FixedTurn:
    """A turn of `FixedThreshold`: nothing is learned."""

    selector: FixedThreshold

    def board(self, group: Group, table: RowTable, world: int) -> Board:
        board = Board(group, [rows.keep for rows in table.rows], world, tolerance=1.0)
        board.thresholds.fill_(self.selector.threshold)
        return board

    def goals(self, table: RowTable) -> list[Goal]:
        goals = []
        for rows in table.rows:
            assert isinstance(rows, TargetRows)
            goals.append(Goal(rows.fewest, rows.target, exact=False))
        return goals

    def aim(self, group: Group, board: Board) -> None:
        """The thresholds never change."""

    def observe(self, table: RowTable, notes: Tensor, counts: Tensor) -> None:
        """There is nothing to learn."""


ThresholdTurn = ReusedTurn | FixedTurn


def threshold_turn(session: Session, modes: Sequence[Hashable]) -> ThresholdTurn | None:
    """How thresholds select in this turn, None if a slot is selected otherwise."""
    if isinstance(session, ThresholdSession):
        return ReusedTurn(session, [str(mode) for mode in modes])
    if isinstance(session, InterleavedSession):
        globally = [mode[1] for mode in modes if isinstance(mode, tuple)]
        if len(globally) == len(modes) and isinstance(session.global_session, ThresholdSession):
            return ReusedTurn(session.global_session, globally)
    selector = session.selector
    if (
        type(session) is EstimateSession
        and isinstance(selector, FixedThreshold)
        and selector.finish == "promise"
    ):
        return FixedTurn(selector)
    return None


def can_fuse_threshold(
    session: Session,
    modes: Sequence[Hashable],
    memory: MemoryState,
    exchange: Exchange,
    codec: Codec,
    bucket_flat: Tensor,
) -> bool:
    """Whether the kernels do what these parts do in this turn, on this device and in this layout."""
    if threshold_turn(session, modes) is None or not isinstance(memory, ResidualState):
        return False
    # Everything but the selection is as for exact top-k over whole tensors.
    return can_fuse(TradTopK(1.0).session(), memory, exchange, codec, bucket_flat)


class FusedTurns:
    """The kernels of one compressor, made when a codec is first used: exact top-k in some turns, thresholds in others."""

    def __init__(self, session: Session, memory: MemoryState, exchange: Exchange) -> None:
        self.session = session
        self.memory = memory
        self.exchange = exchange
        self._kernels: dict[Codec, FusedTopK | FusedThreshold | None] = {}
        """None where there are none."""
        self._boards: WeakKeyDictionary[Group, Board] = WeakKeyDictionary()

    def open(
        self,
        group: Group,
        codec: Codec,
        modes: Sequence[Hashable],
        bucket_flat: Tensor,
        scale: Tensor | None,
        place: Place,
        beside: Group | None = None,
        summed: bool = False,
    ) -> tuple[FusedAccount, Program[Outcome]] | None:
        """Select and encode now; the program does the rest. None where no kernels do what the parts do.

        `beside`: a dense group that is always in the same bucket, to be gathered with the payload or `summed`; kernels that can
        carry it along.
        """
        if codec not in self._kernels:
            parts = (group, codec, modes, bucket_flat, place.world)
            self._kernels[codec] = self._make(*parts, beside, summed)
        kernels = self._kernels[codec]
        if isinstance(kernels, FusedTopK):
            return open_fused(kernels, self.memory, bucket_flat, scale, place)
        if isinstance(kernels, FusedThreshold):
            turn = threshold_turn(self.session, modes)
            assert turn is not None
            return open_threshold(kernels, turn, self.memory, bucket_flat, scale, place)
        return None

    def forget(self, codec: Codec) -> None:
        self._kernels.pop(codec, None)

    def _make(
        self,
        group: Group,
        codec: Codec,
        modes: Sequence[Hashable],
        bucket_flat: Tensor,
        world: int,
        beside: Group | None,
        summed: bool,
    ) -> FusedTopK | FusedThreshold | None:
        parts = (self.memory, self.exchange, codec, bucket_flat)
        dtype = bucket_flat.dtype
        if can_fuse_threshold(self.session, modes, *parts):
            return self._make_threshold(group, codec, modes, dtype, world)
        # The kernels of exact top-k know no selection notes.
        if codec.note_words == 0 and can_fuse(exact_turn(self.session, modes), *parts):
            return make_kernels(self.memory, group, codec, dtype, world, beside, summed)
        return None

    def _make_threshold(
        self,
        group: Group,
        codec: Codec,
        modes: Sequence[Hashable],
        dtype: torch.dtype,
        world: int,
    ) -> FusedThreshold:
        """Those of one group share its thresholds and buffers."""
        turn = threshold_turn(self.session, modes)
        assert turn is not None
        if group not in self._boards:
            self._boards[group] = turn.board(group, codec.table, world)
        return FusedThreshold(group, codec, self._boards[group], turn.goals(codec.table), dtype)


def open_threshold(
    kernels: FusedThreshold,
    turn: ThresholdTurn,
    memory: MemoryState,
    bucket_flat: Tensor,
    scale: Tensor | None,
    place: Place,
) -> tuple[FusedAccount, Program[Outcome]]:
    """As `open_fused`; the program also lets the selection learn from all headers."""
    turn.aim(kernels.group, kernels.board)
    account, program = open_fused(kernels, memory, bucket_flat, scale, place)
    return account, _learn(kernels, turn, program, place)


def _learn(
    kernels: FusedThreshold, turn: ThresholdTurn, program: Program[Outcome], place: Place
) -> Program[Outcome]:
    outcome = yield from program
    counts, notes = kernels.take_slot_words()
    turn.observe(kernels.codec.table, notes, counts)
    return replace(outcome, sent=counts[place.rank])
