"""Random choice: the same places on every rank, drawn anew in every step."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.layout import WHOLE_TENSOR, RowTable, Slot, SlotRows, rows_along
from thinwire.select.base import Picks, Selector, Session, concatenate, picks_at
from thinwire.validate import check_density


@dataclass(frozen=True)
class RandomChoice(Selector):
    """k = max(1, floor(n x density)) places of each tensor, every place equally likely.

    1. Cut the tensor into k strata of equal length (to one element) and draw one place in each.
    2. Rotate all of them by one random shift, which makes the probability of every place exactly k / n.

    Draws come from a generator of their own, seeded with the parameter's name and step: the same on all ranks, the
    same after a resume, and the global generators are left alone. The work grows with k, not with n.
    """

    density: float
    """Fraction of the entries kept."""
    seed: int = 0
    """Of all draws; the same on all ranks."""

    same_on_all_ranks = True

    def __post_init__(self) -> None:
        check_density("density", self.density)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UsageError(f"seed is {self.seed!r}; it must be a whole number")

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        return rows_along(slot, WHOLE_TENSOR, self.density)

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        return self.session().pick(c, table)

    def session(self) -> RandomSession:
        return RandomSession(self)


class RandomSession(Session):
    selector: RandomChoice

    def __init__(self, selector: RandomChoice) -> None:
        super().__init__(selector)
        self._counts: dict[str, int] = {}

    def begin(self, names: Sequence[str], counts: Sequence[int]) -> Hashable:
        # Every exchange has a draw of its own, but always the same shapes: one mode.
        self._counts.update(zip(names, counts, strict=True))
        return None

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        indices = [
            draw_places(rows.length, rows.keep, self._generator(rows.slot.name, c.device))
            for rows in table.rows
        ]
        return picks_at(c, table, concatenate(indices, c.device))

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        return generator_for(name, self._counts.get(name, 0), self.selector.seed, device)


def generator_for(name: str, step: int, seed: int, device: torch.device) -> torch.Generator:
    """A generator that belongs to one parameter in one step."""
    mixed = zlib.crc32(f"{name}/{step}/{seed}".encode())
    return torch.Generator(device).manual_seed(mixed)


def draw_places(length: int, keep: int, generator: torch.Generator) -> Tensor:
    """`keep` different places below `length`, ascending."""
    device = generator.device
    if keep == length:
        return torch.arange(length, device=device)
    edges = torch.arange(keep + 1, device=device) * length // keep
    sizes = edges[1:] - edges[:-1]
    # 2^53 equal steps address every element of any tensor.
    inside = torch.rand(keep, dtype=torch.float64, generator=generator, device=device)
    shift = torch.randint(length, (1,), generator=generator, device=device)
    places = edges[:-1] + (inside * sizes).long()
    return ((places + shift) % length).sort().values
