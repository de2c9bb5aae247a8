"""How a threshold selection keeps its promise about the number of entries.

Estimated thresholds miss, on some data by a factor of hundreds. Whatever the estimate, the entries sent are the m
largest magnitudes of the tensor, where m is the number at or above the threshold unless that breaks the promise:

    more than `most`       m = most       (cut by magnitude, never by index order)
    fewer than `fewest`    m = target     (the threshold is lowered to the target-th magnitude)

It always ends: a constant, an all-zero or a one-element tensor has a target-th magnitude too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.cuda.fused_threshold import Goal
from thinwire.kernels.looks import Look, Targets, TorchLook
from thinwire.kernels.topk import row_topk
from thinwire.layout import RowTable, Slot, SlotRows, keep_count, remembered
from thinwire.select.base import Picks, Selector, Session, Turn, picks_of
from thinwire.select.threshold_reused import ThresholdTurn
from thinwire.validate import check_choice, check_density

FINISHES = ("promise", "published")
# Published methods send whatever survives; the payload still needs an end.
PUBLISHED_CAPACITY = 4
# Halvings of a threshold that was too high before the exact k-th magnitude is looked up.
LOWERINGS = 4


@dataclass(frozen=True)
class TargetRows(SlotRows):
    """One row = one tensor that wants `wanted` entries, at least `least`, and has `places` for them.

    An exchange that hands out parts of a tensor gives each a share of the places (`keep`); what is wanted of a part
    is the same share.
    """

    wanted: int
    least: int
    places: int

    @property
    def target(self) -> int:
        return min(self.length, max(1, self.wanted * self.keep // self.places))

    @property
    def fewest(self) -> int:
        return min(self.target, self.least * self.keep // self.places)


@dataclass(frozen=True)
class ThresholdSelector(Selector):
    """Entries at or above an estimated threshold: between 0.8 and 1.25 times density x n of them.

    `finish="published"` sends what the paper's estimate gives, be it nothing, up to a capacity of 4 k.
    """

    density: float
    """Fraction of the entries kept."""
    finish: str = "promise"
    """"promise" keeps the number of entries close to the density, "published" sends what the paper's estimate gives."""

    computed_by = (*Selector.computed_by, "estimate")
    has_exact_count = False

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_choice("finish", self.finish, FINISHES)

    @property
    def torch_only(self) -> str:  # type: ignore[override]
        """Kernels send at least one entry."""
        return 'finish="published"' if self.finish == "published" else ""

    @property
    def takes_largest(self) -> bool:  # type: ignore[override]
        """As published it may send nothing."""
        return self.finish == "promise"

    def capacity(self, target: int) -> int:
        """Places in the payload of a tensor that wants `target` entries."""
        if self.finish == "published":
            return PUBLISHED_CAPACITY * target
        return max(1, 5 * target // 4)

    def fewest(self, target: int) -> int:
        """Below this number of survivors the threshold is lowered.

        0.8 (target + 1), because target is density x n rounded down and the promise is about density.
        """
        return 0 if self.finish == "published" else min(target, -(-4 * (target + 1) // 5))

    def rows(self, slot: Slot, mode: Hashable = None) -> SlotRows:
        target = keep_count(slot.numel, self.density)
        keep = min(slot.numel, self.capacity(target))
        return TargetRows(
            slot, (), (), slot.numel, 1, keep, "whole tensor", target, self.fewest(target), keep
        )

    def estimate(self, look: Look) -> Tensor:
        """The threshold of every slot, [slots]; not a number where the data gives no estimate."""
        raise NotImplementedError

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        return self.session().pick(c, table)

    def session(self) -> EstimateSession:
        return EstimateSession(self)


class EstimateSession(Session):
    """Estimates for all tensors of a table, and finishes tensor by tensor; selections that sample or learn override `thresholds`."""

    selector: ThresholdSelector

    def turn(self, modes: Hashable) -> Turn:
        return EstimateTurn(self)

    def thresholds(self, look: TorchLook, table: RowTable) -> Tensor:
        """[slots]"""
        return self.selector.estimate(look)

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        if not table.rows:
            none = torch.zeros(0, dtype=torch.int64, device=c.device)
            return Picks(c[:0], none, none.int())
        all_rows = [target_rows(rows) for rows in table.rows]
        look = TorchLook([rows.matrix(c) for rows in all_rows], targets_of(table, c.device))
        thresholds = unless_everything(self.thresholds(look, table), table).to(c.dtype)
        found = [
            finish(*pair)
            for pair in zip(look.magnitudes, thresholds.unbind(), all_rows, strict=True)
        ]
        indices = torch.cat([chosen for chosen, _ in found])
        return picks_of(c, table, indices, torch.stack([count for _, count in found]))


class EstimateTurn(ThresholdTurn):
    """Thresholds are estimated anew in every step; nothing is learned."""

    session: EstimateSession
    tolerance = 1.0

    def usual_entries(self, slots: Sequence[Slot]) -> list[int]:
        return [self.session.selector.rows(slot).keep for slot in slots]

    def goals(self, table: RowTable) -> list[Goal]:
        all_rows = map(target_rows, table.rows)
        return [Goal(rows.fewest, rows.target, exact=False) for rows in all_rows]

    def estimate(self, look: Look, table: RowTable) -> Tensor:
        """[slots]: for kernels, the thresholds of a table's slots."""
        return unless_everything(self.session.selector.estimate(look), table)


def target_rows(rows: SlotRows) -> TargetRows:
    assert isinstance(rows, TargetRows)
    return rows


def targets_of(table: RowTable, device: torch.device) -> Targets:
    """What the slots of a table want, made once."""
    pairs = ((rows.length, target_rows(rows).target) for rows in table.rows)
    return remembered(table, ("targets", device), lambda: Targets(list(pairs), device))


def unless_everything(thresholds: Tensor, table: RowTable) -> Tensor:
    """All of a tensor is all of it, whatever an estimate says."""
    whole = [target_rows(rows).target == rows.length == rows.keep for rows in table.rows]
    if not any(whole):
        return thresholds
    targets = targets_of(table, thresholds.device)
    return torch.where(targets.listed("everything", whole), 0.0, thresholds)


def finish(magnitude: Tensor, threshold: Tensor, rows: TargetRows) -> tuple[Tensor, Tensor]:
    """(indices [keep], ascending, unused ones 0 and last; how many are used)."""
    if magnitude.device.type == "cpu":
        return _finish_by_shape(magnitude, threshold, rows)
    return finish_in_capacity(magnitude, threshold, rows)


def finish_in_capacity(
    magnitude: Tensor, threshold: Tensor, rows: TargetRows
) -> tuple[Tensor, Tensor]:
    """The definition, in fixed shapes and without reading anything back: for accelerators, and the reference.

    1. m = how many reach the threshold, corrected as the module says.
    2. The `keep` largest, ascending; of these the m largest by a stable sort, so that ties go to the lowest index.
    """
    reached = (magnitude >= threshold).sum()
    m = torch.where(reached < rows.fewest, rows.target, reached.clamp(max=rows.keep))
    top = row_topk(magnitude, rows.keep)
    order = magnitude[top].sort(descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(rows.keep, device=order.device)
    used = rank < m
    indices = torch.where(used, top, rows.length).sort().values
    return torch.where(indices < rows.length, indices, 0), m


def _finish_by_shape(
    magnitude: Tensor, threshold: Tensor, rows: TargetRows
) -> tuple[Tensor, Tensor]:
    """The same entries; where shapes may depend on data, only survivors are ever sorted."""
    survivors = (magnitude >= threshold).nonzero().view(-1)
    most = rows.keep
    if survivors.numel() < rows.fewest:
        survivors, most = _lower(magnitude, threshold, rows.target), rows.target
    if survivors.numel() > most:
        survivors = survivors[row_topk(magnitude[survivors], most)]
    indices = torch.zeros(rows.keep, dtype=torch.int64)
    indices[: survivors.numel()] = survivors
    return indices, torch.tensor(survivors.numel())


def _lower(magnitude: Tensor, threshold: Tensor, target: int) -> Tensor:
    """At least `target` survivors, the `target` largest among them."""
    for halving in range(1, LOWERINGS + 1):
        lowered = threshold * 0.5**halving
        if not bool(lowered.isfinite()) or float(lowered) <= 0.0:
            break
        survivors = (magnitude >= lowered).nonzero().view(-1)
        if survivors.numel() >= target:
            return survivors
    return row_topk(magnitude, target)
