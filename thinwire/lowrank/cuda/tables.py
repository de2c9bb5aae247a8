"""The tables that tell the CUDA kernels where every matrix of a group lies, and its factors; written once per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.cuda.kernels import WARP, WIDE
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import Matrices
from thinwire.plan.groups import Group

WARPS = 8
CHUNK = 128
"""Rows of a tile."""
SPAN = 128
"""Columns of a tile."""
THREADS = WARP * WARPS
QUAD = 4
WIDE_WARPS = 4
WIDE_LINES = 4


@dataclass(frozen=True)
class Placed:
    """One matrix as struct Matrix of products.cu has it: offsets of elements, rows and columns as they lie in memory."""

    gradient: int
    memory: int
    sent: int
    known: int
    parts: int
    rows: int
    columns: int
    width: int
    slot: int
    by_rows: bool

    def words(self, lines: int) -> list[int]:
        """int64; two 32-bit numbers to a word. `lines` is how long the kernels take a line of a factor to be."""
        aligned = not (self.columns % QUAD or self.gradient % QUAD or self.memory % QUAD)
        lined = self.width == lines and not self.known % QUAD
        return [
            self.gradient,
            self.memory,
            self.sent,
            self.known,
            self.parts,
            self.rows | self.columns << 32,
            self.width | self.slot << 32,
            int(self.by_rows) | int(aligned) << 32,
            int(lined),
        ]


@dataclass(frozen=True, eq=False)
class Tables:
    """What is sent in one sum: all matrices, and the tiles that one block each takes, int32 [tiles, 3]."""

    matrices: Tensor
    row_tiles: Tensor
    """Of matrices whose factor has a line per row: (matrix, first row, warps that share a row if lines are short)."""
    column_tiles: Tensor
    """Of the others: (matrix, first row, first column)."""
    part_tiles: Tensor
    """Of what those send: (matrix, first number, 0)."""
    tiles: Tensor
    """Of all matrices: (matrix, first row, first column)."""
    parts: int
    """Numbers that the parts of sums by columns take."""


def is_turned(shape: Matrices) -> bool | None:
    """Whether columns are contiguous instead of rows; None if neither are."""
    _, row, column = shape.strides
    if (column == 1 or shape.columns == 1) and (row == shape.columns or shape.rows == 1):
        return False
    if (row == 1 or shape.rows == 1) and (column == shape.rows or shape.columns == 1):
        return True
    return None


def make_tables(group: Group, sent: FactorLayout, known: FactorLayout, lines: int) -> Tables:
    """`known` holds the other factor of every matrix; both are cut into the same batches."""
    placed = place_matrices(group, sent, known)
    row_tiles, column_tiles, part_tiles, tiles = [], [], [], []
    for which, one in enumerate(placed):
        cut = [
            (which, row, column)
            for row in range(0, one.rows, CHUNK)
            for column in range(0, one.columns, SPAN)
        ]
        tiles += cut
        if one.by_rows:
            team = team_of(one.columns)
            step = WARP // lines * (WARPS // team) if lines <= WIDE else WIDE_LINES * WIDE_WARPS
            row_tiles += [(which, row, team) for row in range(0, one.rows, step)]
        else:
            column_tiles += cut
            numbers = one.columns * one.width
            part_tiles += [(which, number, 0) for number in range(0, numbers, THREADS)]
    words = torch.tensor([one.words(lines) for one in placed])
    return Tables(
        matrices=words.to(group.device),
        row_tiles=_tiles(row_tiles, group),
        column_tiles=_tiles(column_tiles, group),
        part_tiles=_tiles(part_tiles, group),
        tiles=_tiles(tiles, group),
        parts=sum(_parts(one) for one in placed),
    )


def team_of(columns: int) -> int:
    """How many warps share a row, so that a lane has about two times four columns of it."""
    team = 1
    while team < WARPS and 2 * SPAN * team < columns:
        team *= 2
    return team


def _tiles(found: Sequence[tuple[int, int, int]], group: Group) -> Tensor:
    return torch.tensor(found, dtype=torch.int32).reshape(-1, 3).to(group.device)


def _parts(one: Placed) -> int:
    return 0 if one.by_rows else -(-one.rows // CHUNK) * one.columns * one.width


def place_matrices(group: Group, sent: FactorLayout, known: FactorLayout) -> list[Placed]:
    found: list[Placed] = []
    at_sent = at_known = parts = 0
    for batch, side, own, other in zip(
        sent.batches, sent.sides, sent.shapes, known.shapes, strict=True
    ):
        turned = is_turned(batch.shape)
        assert turned is not None
        sizes = batch.shape.rows, batch.shape.columns
        for offset, slot in zip(offsets_of(batch), batch.owners, strict=True):
            one = Placed(
                gradient=offset - group.slots[slot].offset + group.sources[slot].offset,
                memory=offset,
                sent=at_sent,
                known=at_known,
                parts=parts,
                rows=sizes[1] if turned else sizes[0],
                columns=sizes[0] if turned else sizes[1],
                width=batch.rank,
                slot=slot,
                by_rows=(side == "p") != turned,
            )
            found.append(one)
            at_sent += own[1] * own[2]
            at_known += other[1] * other[2]
            parts += _parts(one)
    return found


def offsets_of(batch: MatrixBatch) -> list[int]:
    """Where each matrix begins in the group's buffer."""
    return [run.first + number * run.step for run in batch.runs for number in range(run.count)]
