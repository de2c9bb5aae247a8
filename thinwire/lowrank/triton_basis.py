"""All bases of a group in one launch: the fast path of `cholesky_orthogonalise` for few columns.

One program owns one matrix, so the order of additions is fixed and every rank computes the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.lowrank.basis import RIDGE


def orthogonalise_flat(flat: Tensor, spares: Tensor, table: Tensor, rank: int) -> Tensor:
    """Bases of all matrices of a flat buffer; `table` int64 [matrices, 3] holds (offset, length, columns) of each."""
    bases = torch.empty_like(spares)
    columns = max(2, triton.next_power_of_2(rank))
    _orthogonalise[(table.shape[0],)](
        flat, spares, bases, table, RIDGE, COLUMNS=columns, ROWS=4096 // columns**2, num_warps=8
    )
    return bases


@triton.jit
def _load(
    data, spare, row, length, width, inverse, alive, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Rows of the scaled factor in float64; dead columns come from the spare one."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < length) & (columns[None, :] < width)
    at = rows[:, None] * width + columns[None, :]
    found = tl.load(data + at, inside, 0.0)
    other = tl.load(spare + at, inside, 0.0)
    return tl.where(alive[None, :], found * inverse[None, :], other).to(tl.float64)


@triton.jit
def _times(values, matrix):
    """values @ matrix^T for a narrow matrix."""
    return tl.sum(values[:, None, :] * matrix[None, :, :], 2)


@triton.jit
def _gram(
    data, spare, length, width, inverse, alive, basis, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    total = tl.zeros((COLUMNS, COLUMNS), tl.float64)
    for row in range(0, length, ROWS):
        values = _load(data, spare, row, length, width, inverse, alive, COLUMNS, ROWS)
        values = _times(values, basis)
        total += tl.sum(values[:, :, None] * values[:, None, :], 0)
    return total


@triton.jit
def _cholesky(gram, width, ridge, COLUMNS: tl.constexpr):
    """(inverse of the lower factor, what each column adds to those before it)."""
    place = tl.arange(0, COLUMNS)
    eye = tl.where(place[:, None] == place[None, :], 1.0, 0.0).to(tl.float64)
    largest = tl.max(tl.sum(gram * eye, 1), 0)
    gram += tl.where(place[None, :] < width, ridge * largest, 1.0) * eye
    added = tl.zeros((COLUMNS,), tl.float64)
    inverse = tl.zeros((COLUMNS, COLUMNS), tl.float64)
    lower = tl.zeros((COLUMNS, COLUMNS), tl.float64)
    for j in tl.static_range(COLUMNS):
        column = tl.sum(tl.where(place[None, :] == j, gram, 0.0), 1)
        pivot = tl.sum(tl.where(place == j, column, 0.0), 0)
        root = tl.sqrt(pivot)
        column = tl.where(place >= j, column / root, 0.0)
        added = tl.where(place == j, pivot, added)
        gram -= column[:, None] * column[None, :]
        lower = tl.where(place[None, :] == j, column[:, None], lower)
        before = tl.sum(tl.where(place[:, None] == j, lower, 0.0), 0)
        before = tl.where(place < j, before, 0.0)
        done = tl.sum(before[:, None] * inverse, 0)
        fresh = (tl.where(place == j, 1.0, 0.0) - done) / root
        inverse = tl.where(place[:, None] == j, fresh[None, :], inverse)
    return inverse, added


@triton.jit
def _orthogonalise(flat, spares, bases, table, ridge, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    matrix = tl.program_id(0)
    offset = tl.load(table + 3 * matrix)
    length = tl.load(table + 3 * matrix + 1)
    width = tl.load(table + 3 * matrix + 2)
    data, spare, out = flat + offset, spares + offset, bases + offset
    place = tl.arange(0, COLUMNS)
    eye = tl.where(place[:, None] == place[None, :], 1.0, 0.0).to(tl.float64)

    # 1. Scale by the largest magnitude; a NaN must not vanish in a maximum, so it is counted as infinite.
    largest = tl.zeros((COLUMNS,), tl.float32)
    for row in range(0, length, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows[:, None] < length) & (place[None, :] < width)
        found = tl.abs(tl.load(data + rows[:, None] * width + place[None, :], inside, 0.0))
        found = tl.where(found == found, found, float("inf"))
        largest = tl.maximum(largest, tl.max(found, 0))
    alive = (largest > 0) & (largest < float("inf"))
    inverse = 1.0 / tl.where(alive, largest, 1.0)

    # 2. and 3. Replace columns that are dead or add nothing.
    gram = _gram(data, spare, length, width, inverse, alive, eye, COLUMNS, ROWS)
    _, added = _cholesky(gram, width, ridge, COLUMNS)
    most = tl.max(tl.where(place < width, added, 0.0), 0)
    alive = alive & (added > 4 * ridge * most)

    # 4. Twice.
    gram = _gram(data, spare, length, width, inverse, alive, eye, COLUMNS, ROWS)
    first, _ = _cholesky(gram, width, ridge, COLUMNS)
    gram = _gram(data, spare, length, width, inverse, alive, first, COLUMNS, ROWS)
    second, _ = _cholesky(gram, width, ridge, COLUMNS)
    both = tl.sum(second[:, :, None] * first[None, :, :], 1)
    for row in range(0, length, ROWS):
        values = _load(data, spare, row, length, width, inverse, alive, COLUMNS, ROWS)
        rows = row + tl.arange(0, ROWS)
        inside = (rows[:, None] < length) & (place[None, :] < width)
        result = _times(values, both).to(tl.float32)
        tl.store(out + rows[:, None] * width + place[None, :], result, inside)
