"""Tables that tell the kernels where the matrices of a group and their factors lie. They are made once per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.structs import make_rows, make_table
from thinwire.layout import Group
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.cuda.kernels import (
    CHUNK,
    SPAN,
    THREADS,
    WARP,
    WARPS,
    WIDE,
    WIDE_LINES,
    WIDE_WARPS,
    Matrix,
    Tile,
)
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import Matrices

QUAD = 4


@dataclass(frozen=True)
class Placed:
    """One matrix: offsets of elements, rows and columns as they lie in memory. Names are those of struct Matrix."""

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

    def fields(self, lines: int) -> dict[str, int]:
        """struct Matrix; `lines` is how long the kernels take a line of a factor to be."""
        aligned = not (self.columns % QUAD or self.gradient % QUAD or self.memory % QUAD)
        lined = self.width == lines and not self.known % QUAD
        return {**asdict(self), "vector": aligned, "lined": lined}


@dataclass(frozen=True, eq=False)
class LowRankTables:
    """What is sent in one sum: all matrices, and their tiles (struct Tile), a block for each."""

    matrices: Tensor
    """struct Matrix"""
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
    """Whether columns are contiguous instead of rows. None if neither are."""
    _, row, column = shape.strides
    if (column == 1 or shape.columns == 1) and (row == shape.columns or shape.rows == 1):
        return False
    if (row == 1 or shape.rows == 1) and (column == shape.rows or shape.columns == 1):
        return True
    return None


def make_tables(group: Group, sent: FactorLayout, known: FactorLayout, lines: int) -> LowRankTables:
    """`known` holds the other factor of every matrix; both are cut into the same batches."""
    placed = place_matrices(group, sent, known)
    row_tiles, column_tiles, part_tiles, tiles = [], [], [], []
    for index, one in enumerate(placed):
        cut = [
            (index, row, column)
            for row in range(0, one.rows, CHUNK)
            for column in range(0, one.columns, SPAN)
        ]
        tiles += cut
        if one.by_rows:
            warps = warps_of(one.columns)
            step = WARP // lines * (WARPS // warps) if lines <= WIDE else WIDE_LINES * WIDE_WARPS
            row_tiles += [(index, row, warps) for row in range(0, one.rows, step)]
        else:
            column_tiles += cut
            numbers = one.columns * one.width
            part_tiles += [(index, number, 0) for number in range(0, numbers, THREADS)]
    matrices = make_rows(Matrix, [one.fields(lines) for one in placed])
    return LowRankTables(
        matrices=matrices.to(group.device),
        row_tiles=_tiles(row_tiles, group),
        column_tiles=_tiles(column_tiles, group),
        part_tiles=_tiles(part_tiles, group),
        tiles=_tiles(tiles, group),
        parts=sum(_parts(one) for one in placed),
    )


def warps_of(columns: int) -> int:
    """How many warps share a row: so many that a lane has about eight columns of it."""
    warps = 1
    while warps < WARPS and 2 * SPAN * warps < columns:
        warps *= 2
    return warps


def _tiles(found: Sequence[tuple[int, int, int]], group: Group) -> Tensor:
    matrix, row, column = torch.tensor(found, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return make_table(Tile, matrix=matrix, row=row, column=column).to(group.device)


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
