"""Batches: matrices of one shape inside a group's buffer that are multiplied together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.layout import Group
from thinwire.lowrank.matrices import Matrices


@dataclass(frozen=True)
class MatrixRun:
    """Matrices at equal distances, so that one strided view holds them all."""

    first: int
    step: int
    count: int


@dataclass(frozen=True, eq=False)
class MatrixBatch:
    """Same-shape matrices of one mode; `members` are the parameters they belong to, in order."""

    members: tuple[tuple[str, Matrices], ...]
    rank: int
    mode: Hashable
    runs: tuple[MatrixRun, ...]
    owners: tuple[int, ...]
    """Which slot of the group each matrix belongs to."""
    device: torch.device
    alone: bool
    """Whether results must not depend on what else is in the bucket."""

    @property
    def shape(self) -> Matrices:
        """Rows, columns and strides of every matrix in the batch."""
        return self.members[0][1]

    @property
    def size(self) -> int:
        return sum(shape.count for _, shape in self.members)

    def factor_shape(self, side: str) -> tuple[int, int, int]:
        return (self.size, self.shape.side(side), self.rank)

    def views(self, flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(slice of the batch, [b, rows, columns] inside `flat`) run by run."""
        _, row, column = self.shape.strides
        done = 0
        for run in self.runs:
            size = (run.count, self.shape.rows, self.shape.columns)
            start = flat.storage_offset() + run.first
            yield (
                slice(done, done + run.count),
                flat.as_strided(size, (run.step, row, column), start),
            )
            done += run.count

    def multiply(self, flat: Tensor, basis: Tensor, side: str, out: Tensor) -> None:
        """out = A x basis for side "p", A^T x basis for side "q"."""
        for part, matrices in self.views(flat):
            placed, target = self._placed(matrices), self._placed(out[part])
            left = placed if side == "p" else placed.mT
            torch.bmm(left, self._placed(basis[part]), out=target)
            _put_back(target, out[part])

    def rebuild(self, flat: Tensor, p: Tensor, q: Tensor) -> None:
        """Write p q^T into the matrices."""
        for part, matrices in self.views(flat):
            target = self._placed(matrices)
            torch.bmm(self._placed(p[part]), self._placed(q[part]).mT, out=target)
            _put_back(target, matrices)

    def add(self, flat: Tensor, p: Tensor, q: Tensor, alpha: int) -> None:
        """Add alpha x p q^T to the matrices."""
        for part, matrices in self.views(flat):
            target = self._placed(matrices)
            target.baddbmm_(self._placed(p[part]), self._placed(q[part]).mT, alpha=alpha)
            _put_back(target, matrices)

    def _placed(self, tensor: Tensor) -> Tensor:
        """The tensor at an address that does not depend on its neighbours, where bits must not either."""
        return tensor.clone() if self.alone else tensor


def _put_back(target: Tensor, origin: Tensor) -> None:
    if target.data_ptr() != origin.data_ptr():
        origin.copy_(target)


def make_batches(
    group: Group,
    shapes: Sequence[Matrices],
    rank: int,
    modes: Sequence[Hashable],
    one_by_one: bool,
) -> list[MatrixBatch]:
    """Sort a group's slots into batches.

    `one_by_one` gives every slot a batch of its own: products of several matrices, or of one at another address, may
    round differently, so that results would depend on the bucketing.
    """
    members: dict[Hashable, list[int]] = {}
    for index, (shape, mode) in enumerate(zip(shapes, modes, strict=True)):
        alone = index if one_by_one else None
        key = (shape.rows, shape.columns, shape.strides[1:], mode, alone)
        members.setdefault(key, []).append(index)
    return [
        _make_batch(group, shapes, rank, modes, chosen, one_by_one) for chosen in members.values()
    ]


def _make_batch(
    group: Group,
    shapes: Sequence[Matrices],
    rank: int,
    modes: Sequence[Hashable],
    chosen: Sequence[int],
    alone: bool,
) -> MatrixBatch:
    offsets = [
        group.slots[index].offset + number * shapes[index].strides[0]
        for index in chosen
        for number in range(shapes[index].count)
    ]
    owners = tuple(index for index in chosen for _ in range(shapes[index].count))
    return MatrixBatch(
        members=tuple((group.slots[index].name, shapes[index]) for index in chosen),
        rank=shapes[chosen[0]].rank(rank),
        mode=modes[chosen[0]],
        runs=tuple(find_runs(offsets)),
        owners=owners,
        device=group.device,
        alone=alone,
    )


def find_runs(offsets: Sequence[int]) -> Iterator[MatrixRun]:
    """Cut a list of offsets into stretches with a constant step."""
    start = 0
    while start < len(offsets):
        end = start + 1
        step = offsets[end] - offsets[start] if end < len(offsets) else 1
        while end < len(offsets) and offsets[end] - offsets[end - 1] == step:
            end += 1
        yield MatrixRun(offsets[start], step, end - start)
        start = end
