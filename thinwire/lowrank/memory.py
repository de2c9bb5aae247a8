"""Low-rank memory: the residual of every parameter, and the bases its next step starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.layout import ParameterInfo
from thinwire.lowrank.basis import draw, orthogonalise
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.layout import FactorLayout
from thinwire.lowrank.matrices import Matrices, matrices_of
from thinwire.memory.residual import Residual, ResidualState


class LowRankMemory(ResidualState):
    """Bases are orthonormal and the same on all ranks, so they have no units and belong to no rank.

    A parameter's first basis is drawn from its name; the same numbers replace dead columns later.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(Residual())
        self.rank = rank
        self._bases: dict[tuple[str, str], Tensor] = {}

    def bases(self, layout: FactorLayout, like: Tensor) -> Tensor:
        """All bases of a layout in one flat tensor, in the dtype and on the device of `like`."""
        pieces = []
        for batch, side in zip(layout.batches, layout.sides, strict=True):
            for name, shape in batch.members:
                basis = self._bases.get((name, side))
                if basis is None:
                    basis = self._first_basis(name, side, shape, like.dtype)
                self._bases[name, side] = basis = basis.to(like.device, like.dtype)
                pieces.append(basis.reshape(-1))
        return torch.cat(pieces)

    def keep(self, layout: FactorLayout, flat: Tensor) -> None:
        """Remember the bases of a layout."""
        for batch, side, section in zip(
            layout.batches, layout.sides, layout.sections(flat), strict=True
        ):
            counts = [shape.count for _, shape in batch.members]
            for (name, _), basis in zip(batch.members, section.split(counts), strict=True):
                self._bases[name, side] = basis

    def spares(self, batch: MatrixBatch, side: str, like: Tensor) -> Tensor:
        """Columns that replace dead ones, drawn anew."""
        drawn = [self.draw(name, side, shape, like.dtype) for name, shape in batch.members]
        return torch.cat(drawn).to(like.device)

    def draw(self, name: str, side: str, shape: Matrices, dtype: torch.dtype) -> Tensor:
        """Normal numbers of a factor's size, the same for every memory format of the parameter."""
        drawn = draw(f"{name}/{side}", (shape.count, shape.side(side), shape.rank(self.rank)))
        return (shape.to_memory(drawn) if side == "q" else drawn).to(dtype)

    def release(self, names: Sequence[str]) -> None:
        super().release(names)
        gone = set(names)
        for key in [key for key in self._bases if key[0] in gone]:
            del self._bases[key]

    def nbytes(self) -> int:
        return super().nbytes() + sum(basis.nbytes for basis in self._bases.values())

    def save(
        self, info: ParameterInfo, sides: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Copies in logical order; where nothing was sent yet, what the parameter would start from."""
        shape = matrices_of(info.slot(0))
        if shape is None:
            return {}
        wide = torch.float64 if info.dtype == torch.float64 else torch.float32
        saved = {}
        for side in sides:
            basis = self._bases.get((info.name, side))
            if basis is None:
                basis = self._first_basis(info.name, side, shape, wide).to(device)
            saved[side] = (shape.to_logical(basis) if side == "q" else basis).clone()
        return saved

    def load(self, info: ParameterInfo, saved: dict[str, Any]) -> None:
        """Take over what fits. A basis of another rank is of no use: the parameter starts from its name again."""
        shape = matrices_of(info.slot(0))
        for side in ("p", "q"):
            basis = saved.get(side)
            if shape is None or not isinstance(basis, Tensor):
                continue
            if tuple(basis.shape) == (shape.count, shape.side(side), shape.rank(self.rank)):
                basis = shape.to_memory(basis) if side == "q" else basis
                self._bases[info.name, side] = basis.clone()

    def _first_basis(self, name: str, side: str, shape: Matrices, dtype: torch.dtype) -> Tensor:
        drawn = self.draw(name, side, shape, dtype)
        return orthogonalise(drawn, drawn)
