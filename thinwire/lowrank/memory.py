"""Low-rank memory: what every parameter holds back, and the bases its next step starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.layout import Group, ParameterInfo, wide_dtype
from thinwire.lowrank.basis import draw, orthogonalise
from thinwire.lowrank.batches import MatrixBatch
from thinwire.lowrank.layout import FactorLayout, Key
from thinwire.lowrank.matrices import Matrices, matrices_of
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.memory.refresh import Refresh
from thinwire.memory.residual import Residual
from thinwire.memory.store import let_go
from thinwire.select.scaled import Divisor


class LowRankMemory(MemoryState):
    """Another memory with bases beside it.

    Bases are orthonormal and the same on all ranks, so they have no units and belong to no rank.

    A parameter's first basis is drawn from its name; the same numbers replace dead columns later. The bases of a
    layout lie side by side in one tensor, because collecting them in every step costs more than using them.
    """

    def __init__(self, rank: int, held: MemoryState | None = None) -> None:
        self._held = Residual().start() if held is None else held
        """What is held back: a residual, or what an optimizer's scale asks for."""
        self.setting, self.stores = self._held.setting, self._held.stores
        self.rank = rank
        self._flats: dict[tuple[Key, ...], Tensor] = {}
        self._homes: dict[Key, tuple[tuple[Key, ...], int, tuple[int, int, int]]] = {}
        """Where a basis lies: in which flat tensor, from where on, in what shape."""
        self._loose: dict[Key, Tensor] = {}
        """Bases that no layout has claimed yet."""

    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        return self._held.compensate(group, gradients, scale)

    def due(self, names: Sequence[str], counts: Sequence[int]) -> Refresh | None:
        return self._held.due(names, counts)

    def refresh(self, group: Group, mean: Tensor, counts: Sequence[int]) -> None:
        self._held.refresh(group, mean, counts)

    def divisor(self, group: Group, scale: Tensor | None) -> Divisor | None:
        return self._held.divisor(group, scale)

    def bases(self, layout: FactorLayout, like: Tensor) -> Tensor:
        """All bases of a layout in one flat tensor, in the dtype and on the device of `like`."""
        flat = self._flats.get(layout.members)
        if flat is None or flat.dtype != like.dtype or flat.device != like.device:
            pieces = []
            for (name, side), shape in zip(layout.members, layout.shapes_by_member, strict=True):
                basis = self._find((name, side))
                if basis is None:
                    basis = self._first_basis(name, side, shape, like.dtype)
                pieces.append(basis.to(like.device, like.dtype).reshape(-1))
            flat = torch.cat(pieces)
            self.keep(layout, flat)
        return flat

    def keep(self, layout: FactorLayout, flat: Tensor) -> None:
        """Remember the bases of a layout."""
        if layout.members not in self._flats:
            start = 0
            for key, shape in zip(layout.members, layout.shapes_by_member, strict=True):
                self._forget(key)
                size = (shape.count, shape.side(key[1]), shape.rank(self.rank))
                self._homes[key] = (layout.members, start, size)
                start += math.prod(size)
        self._flats[layout.members] = flat

    def _find(self, key: Key) -> Tensor | None:
        if key not in self._homes:
            return self._loose.get(key)
        members, start, size = self._homes[key]
        return self._flats[members][start : start + math.prod(size)].view(size)

    def _forget(self, key: Key) -> None:
        """Drop a basis; those that lay beside it become loose."""
        if key in self._homes:
            members, _, _ = self._homes[key]
            for other in members:
                held = self._find(other)
                assert held is not None
                self._loose[other] = held
            for other in members:
                del self._homes[other]
            del self._flats[members]
        if key in self._loose:
            let_go(self._loose.pop(key))

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
        for key in [key for key in (*self._homes, *self._loose) if key[0] in gone]:
            self._forget(key)

    def nbytes(self) -> int:
        held = (*self._flats.values(), *self._loose.values())
        return super().nbytes() + sum(bases.nbytes for bases in held)

    def save(
        self, info: ParameterInfo, sides: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Copies in logical order; where nothing was sent yet, what the parameter would start from."""
        shape = matrices_of(info.slot(0))
        if shape is None:
            return {}
        wide = wide_dtype(info.dtype)
        saved = {}
        for side in sides:
            basis = self._find((info.name, side))
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
                self._forget((info.name, side))
                self._loose[info.name, side] = basis.clone()

    def _first_basis(self, name: str, side: str, shape: Matrices, dtype: torch.dtype) -> Tensor:
        drawn = self.draw(name, side, shape, dtype)
        return orthogonalise(drawn, drawn)
