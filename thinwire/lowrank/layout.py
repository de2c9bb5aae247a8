"""FactorLayout: where the factors of a group's matrices lie in one flat buffer.

Many small tensors are slow on an accelerator, so everything that needs no matrix product works on the flat one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.lowrank.basis import cholesky_orthogonalise, orthogonalise
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.cuda.kernels import BasisTables, Kernels, has_bases, make_basis_tables
from thinwire.lowrank.matrices import Matrices

Key = tuple[str, str]
"""A parameter's name and "p" or "q"."""
# Factors are padded to a common length up to this many times their own.
MAX_PADDING = 4


class FactorLayout:
    """One factor per batch; `sides` says which."""

    def __init__(
        self,
        batches: Sequence[MatrixBatch],
        sides: Sequence[str],
        draw: Callable[[], list[Tensor]],
    ) -> None:
        self.batches = tuple(batches)
        self.sides = tuple(sides)
        self.shapes = [b.factor_shape(s) for b, s in zip(batches, sides, strict=True)]
        self._sizes = [math.prod(shape) for shape in self.shapes]
        self.numel = sum(self._sizes)
        self._draw = draw
        self.members: tuple[Key, ...] = tuple(
            (name, side) for b, side in zip(batches, sides, strict=True) for name, _ in b.members
        )
        """Whose factors lie here, in order."""

    @property
    def shapes_by_member(self) -> list[Matrices]:
        return [shape for batch in self.batches for _, shape in batch.members]

    @property
    def covered(self) -> int:
        """Elements of the matrices themselves."""
        return sum(b.size * b.shape.rows * b.shape.columns for b in self.batches)

    @cached_property
    def spares(self) -> list[Tensor]:
        """Columns that replace dead ones, one tensor per batch; drawn when a factor is first orthogonalised."""
        return self._draw()

    def only(self, chosen: Sequence[int]) -> FactorLayout:
        """The layout of some of the batches."""
        return FactorLayout(
            [self.batches[index] for index in chosen],
            [self.sides[index] for index in chosen],
            lambda: [self.spares[index] for index in chosen],
        )

    def sections(self, flat: Tensor) -> list[Tensor]:
        """The factors as [size, n or m, r], one per batch."""
        pieces = flat[: self.numel].split_with_sizes(self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def spread(self, per_slot: Tensor) -> Tensor:
        """One value per slot -> one per element."""
        return per_slot.index_select(0, self._owners)

    def orthogonalise(self, flat: Tensor) -> Tensor:
        """Orthonormal bases of all factors, in the same layout."""
        factors = self.sections(flat)
        if flat.device.type == "cpu" or flat.dtype != torch.float32:
            # A copy, so that the address does not depend on what else is in the bucket.
            pairs = zip(factors, self.spares, strict=True)
            return torch.cat([orthogonalise(f.clone(), spare).reshape(-1) for f, spare in pairs])
        rank = max(shape[2] for shape in self.shapes)
        if has_bases(flat.device, rank):
            unread = torch.empty((), dtype=torch.bool, device=flat.device)
            return Kernels(flat.device, rank, flat.dtype).orthogonalise(
                flat, self.basis_tables, unread
            )
        bases = factors
        for pile in self._piles:
            stacked = pile.stack(factors)
            found = cholesky_orthogonalise(stacked, pile.spares)
            for index, basis in zip(pile.members, pile.unstack(found), strict=True):
                bases[index] = basis
        return torch.cat([basis.reshape(-1) for basis in bases])

    @cached_property
    def _owners(self) -> Tensor:
        """int32 [numel]: which slot of the group each element belongs to."""
        sizes = [shape[1] * shape[2] for shape in self.shapes for _ in range(shape[0])]
        owners = [owner for batch in self.batches for owner in batch.owners]
        spread = torch.tensor(owners, dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
        return spread.to(self.batches[0].device)

    @cached_property
    def basis_tables(self) -> BasisTables:
        """What the kernels that orthogonalise need to know."""
        spares = torch.cat([spare.reshape(-1) for spare in self.spares])
        return make_basis_tables(self.shapes, spares)

    @cached_property
    def _piles(self) -> list[Pile]:
        """Batches of the same rank and of similar length, longest first."""
        order = sorted(range(len(self.shapes)), key=lambda index: self.shapes[index][:0:-1])
        piles: list[list[int]] = []
        for index in reversed(order):
            _, length, rank = self.shapes[index]
            _, longest, same = self.shapes[piles[-1][0]] if piles else (0, 0, 0)
            if rank == same and longest <= MAX_PADDING * length:
                piles[-1].append(index)
            else:
                piles.append([index])
        return [make_pile(members, self.shapes, self.spares) for members in piles]


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors of a layout."""

    layout: FactorLayout
    flat: Tensor

    @cached_property
    def sections(self) -> list[Tensor]:
        """[size, n or m, r], one per batch."""
        return self.layout.sections(self.flat)


@dataclass(frozen=True, eq=False)
class Pile:
    """Several batches of factors as one [count, longest, r], the shorter ones with zero rows below."""

    members: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...]
    count: int
    longest: int
    rank: int
    places: Tensor | None
    """int64 [rows]: where each row goes; None where nothing is padded."""
    spares: Tensor

    def stack(self, factors: Sequence[Tensor]) -> Tensor:
        rows = torch.cat([factors[index].reshape(-1, self.rank) for index in self.members])
        size = (self.count, self.longest, self.rank)
        if self.places is None:
            return rows.view(size)
        padded = rows.new_zeros(self.count * self.longest, self.rank)
        return padded.index_copy_(0, self.places, rows).view(size)

    def unstack(self, stacked: Tensor) -> list[Tensor]:
        rows = stacked.reshape(-1, self.rank)
        if self.places is not None:
            rows = rows.index_select(0, self.places)
        pieces = rows.split([shape[0] * shape[1] for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def make_pile(
    members: Sequence[int], shapes: Sequence[tuple[int, int, int]], spares: Sequence[Tensor]
) -> Pile:
    own = tuple(shapes[index] for index in members)
    count = sum(shape[0] for shape in own)
    longest = max(shape[1] for shape in own)
    places = None
    if any(shape[1] != longest for shape in own):
        lengths = [shape[1] for shape in own for _ in range(shape[0])]
        starts = torch.arange(count) * longest
        places = torch.cat(
            [start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)]
        ).to(spares[0].device)
    bare = Pile(tuple(members), own, count, longest, own[0][2], places, spares[0])
    return replace(bare, spares=bare.stack(spares))
