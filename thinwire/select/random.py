"""Random choice: the same places on every rank, drawn anew in every step."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.kernels.cuda.draw import prepare_draw
from thinwire.layout import WHOLE_TENSOR, RowTable, Slot, SlotRows, remembered, rows_along
from thinwire.select.base import RANDOM_PLACES, Picks, Selector, Session, picks_at
from thinwire.validate import check_density

MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomChoice(Selector):
    """k = max(1, floor(n x density)) places of each tensor, every place equally likely.

    1. Cut the tensor into k strata of equal length (to one element) and draw one place in each.
    2. Rotate all of them by one random shift, which makes the probability of every place exactly k / n.

    Draws are hashes of the parameter's name, the step and the stratum: the same on all ranks and devices, the same after a
    resume, and no generator is touched. The work grows with k, not with n, and is done for all tensors of a bucket at once.
    """

    density: float
    """Fraction of the entries kept."""
    seed: int = 0
    """Of all draws; the same on all ranks."""

    form = RANDOM_PLACES
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
        drawing = remembered(
            table,
            (self.selector.seed, c.device),
            lambda: Drawing(table, self.selector.seed, c.device),
        )
        counts = [self._counts.get(rows.slot.name, 0) for rows in table.rows]
        return picks_at(c, table, drawing.draw(counts))


def generator_for(name: str, step: int, seed: int, device: torch.device) -> torch.Generator:
    """A generator that belongs to one parameter in one step."""
    mixed = zlib.crc32(f"{name}/{step}/{seed}".encode())
    return torch.Generator(device).manual_seed(mixed)


class Drawing:
    """The strata of all slots of a table, and what is drawn from them in a step."""

    def __init__(self, table: RowTable, seed: int, device: torch.device) -> None:
        self._device = device
        self._draw = prepare_draw(table, device)
        lengths = torch.tensor([rows.length for rows in table.rows], device=device)
        keeps = torch.tensor([rows.keep for rows in table.rows], device=device)
        names = [zlib.crc32(f"{rows.slot.name}/{seed}".encode()) for rows in table.rows]
        self._seeds = torch.tensor(names, device=device)
        self._slots = table.entry_slots(device).long()
        self._lengths, self._keeps = lengths, keeps
        # Per entry, as a slot's length and keep are.
        self._length, self._keep = lengths[self._slots], keeps[self._slots]
        self._place = table.entry_places(device).long()

    def draw(self, steps: Sequence[int]) -> Tensor:
        """int64 [entries]: different places of every slot, ascending. `steps` has the number of each slot's draw.

        1. Every slot draws its shift, so that the `turned` last of its strata are moved beyond its end and begin it anew.
        2. Every entry draws a place in the stratum that comes to lie there, and moves with it.
        """
        if self._draw is not None:
            return self._draw(self._seeds, self._steps(steps))
        seeds = mix(self._seeds + mix(self._steps(steps)))
        # Of 62 bits: of 32, some places of a long tensor would be drawn more often.
        shift = 1 + ((seeds << 30) ^ mix(seeds + 1)) % self._lengths
        first = self._lengths - shift
        cut = ((first + 1) * self._keeps - 1) // self._lengths
        inside = self._inside(cut, seeds, self._lengths, self._keeps) >= first
        turned = self._keeps - 1 - cut + inside
        strata = self._place - turned[self._slots]
        beyond = strata < 0
        strata = strata + self._keep * beyond
        drawn = self._inside(strata, seeds[self._slots], self._length, self._keep)
        return drawn + shift[self._slots] - self._length * beyond

    def _steps(self, steps: Sequence[int]) -> Tensor:
        if len(set(steps)) == 1:
            return torch.full_like(self._seeds, steps[0])
        made = torch.tensor(steps)
        pinned = made.pin_memory() if self._device.type == "cuda" else made
        return pinned.to(self._device, non_blocking=True)

    @staticmethod
    def _inside(stratum: Tensor, seeds: Tensor, lengths: Tensor, keeps: Tensor) -> Tensor:
        """A place in a stratum, which runs from stratum x length // keep to where the next one begins."""
        begin = stratum * lengths // keeps
        sizes = (stratum + 1) * lengths // keeps - begin
        return begin + ((mix(seeds + 2 + stratum) * sizes) >> 32)


def mix(number: Tensor) -> Tensor:
    """int64: 32 bits that depend on all of the lowest 32 of a number (Wellons, "hash prospector", lowbias32)."""
    x = number & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)
