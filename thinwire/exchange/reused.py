"""Ok-Topk as published: thresholds and borders that are found exactly now and then and reused in between.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP'22). Per slot instead of per flat
model, so that a re-bucketing changes nothing. Differences from the published code, all of them repairs: `>=` against a
k-th magnitude, the residual's intersection through a bitmap, 64-bit border sums, an even split while there are fewer
entries than ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.exchange.base import Exchange, ExchangeSession, Offer, Outcome
from thinwire.exchange.common import (
    count_by_slot,
    keep_alone,
    read_flags,
    slot_of,
    to_wire,
    wire_dtype,
    zero_update,
)
from thinwire.exchange.requests import Program, Sum
from thinwire.exchange.uneven import (
    Entries,
    balance,
    count_everywhere,
    gather_entries,
    round_sums,
    send_to_owners,
)
from thinwire.layout import SlotRows
from thinwire.validate import check_finite_number, check_positive_int


@dataclass(frozen=True, kw_only=True)
class ReusedThresholds(Exchange):
    """The paper's Ok-Topk. Volume is not bounded: counts drift while thresholds are reused, and a step that finds
    the global threshold anew sends up to 2k(P-1) words. Defaults are those of the published VGG job.

    1. Local threshold: k-th largest magnitude every `tau_prime` exchanges, reused and nudged in between.
    2. Borders of P regions with about equal shares of everybody's entries, agreed every `tau` exchanges.
    3. Split and reduce to the regions' owners.
    4. Global threshold: every `tau_prime` exchanges from all sums gathered, reused and nudged in between.
    5. Sums above it are balanced if one rank holds more than `skew` x the mean, then gathered.
    6. Memory is cleared where an entry was selected here and kept globally.
    """

    tau: int = 64
    """Exchanges between two agreements on borders."""
    tau_prime: int = 32
    """Exchanges between two exact thresholds."""
    local_band: tuple[float, float] = (2 / 3, 5 / 4)
    """A local count outside this band (x k) moves the threshold."""
    local_factor: float = 1.012
    """By how much it moves."""
    clamp_above: float = 4 / 3
    """Before sending, raise a reused threshold while it selects more than this (x k)."""
    clamp_factor: float = 1.03
    """By how much it is raised, each time,"""
    clamp_times: int = 5
    """and how often at most."""
    global_band: tuple[float, float] = (2 / 3, 4 / 3)
    """A global count outside this band (x k) moves the global threshold."""
    global_factor: float = 1.008
    """By how much it moves."""
    skew: float = 4.0
    """Sums are balanced if one rank holds more than this (x the mean) of them."""

    host_sync_free = False
    sums_on_the_way = True

    def __post_init__(self) -> None:
        check_positive_int("tau", self.tau)
        check_positive_int("tau_prime", self.tau_prime)
        for name in ("local_factor", "clamp_above", "clamp_factor", "global_factor", "skew"):
            check_at_least_one(name, getattr(self, name))
        for name in ("local_band", "global_band"):
            check_band(name, getattr(self, name))
        if type(self.clamp_times) is not int or self.clamp_times < 0:
            raise UsageError(
                f"clamp_times is {self.clamp_times!r}; it must be a whole number of at least 0"
            )

    def session(self) -> ExchangeSession:
        return ReusedSession(self)

    def run(self, offer: Offer) -> Program[Outcome]:
        outcome = yield from self.session().run(offer)
        return outcome

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        return 2 * (32 + value_bits) * (world - 1) / world


@dataclass
class SlotState:
    """What one slot reuses. `local` is this rank's own; everything else is the same on all ranks."""

    count: int = 0
    local: float = 0.0
    global_: float = 0.0
    cuts: list[int] = field(default_factory=list)
    """Inner borders inside the slot, rising."""


class ReusedSession(ExchangeSession):
    """Thresholds and borders by parameter name."""

    def __init__(self, setting: ReusedThresholds) -> None:
        super().__init__(setting)
        self.setting = setting
        self.slots: dict[str, SlotState] = {}

    def run(self, offer: Offer) -> Program[Outcome]:
        if offer.place.world == 1:
            return keep_alone(offer)
        states = [self._state(rows, offer) for rows in offer.codec.table.rows]
        if self.journal is not None:
            names = [rows.slot.name for rows in offer.codec.table.rows]
            before = dict(zip(names, map(replace, states), strict=True))
            self.journal.note_action(partial(self.slots.update, before))
        step = ReusedStep(self.setting, offer, states)
        outcome = yield from step.run()
        return outcome

    def _state(self, rows: SlotRows, offer: Offer) -> SlotState:
        state = self.slots.setdefault(rows.slot.name, SlotState())
        if state.count and len(state.cuts) != offer.place.world - 1:
            # Saved by another number of ranks: everything is found anew.
            state = self.slots[rows.slot.name] = SlotState()
        return state

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {name: self._fields(self.slots.get(name, SlotState())) for name in names}

    def _fields(self, state: SlotState) -> dict[str, Any]:
        return {
            "exchange_count": state.count,
            "exchange_local": state.local,
            "exchange_global": state.global_,
            # As text: a distributed load wants tensors of the same shape on both sides, and before the first exchange
            # there are no cuts.
            "exchange_cuts": " ".join(map(str, state.cuts)),
        }

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        for name, fields in state.items():
            if "exchange_count" in fields:
                self.slots[name] = SlotState(
                    int(fields["exchange_count"]),
                    float(fields["exchange_local"]),
                    float(fields["exchange_global"]),
                    [int(cut) for cut in str(fields["exchange_cuts"]).split()],
                )


class ReusedStep:
    """One exchange of one group, phase by phase."""

    def __init__(
        self, setting: ReusedThresholds, offer: Offer, states: Sequence[SlotState]
    ) -> None:
        self.setting = setting
        self.offer = offer
        self.states = states
        self.rows = offer.codec.table.rows

    def run(self) -> Program[Outcome]:
        offer, account = self.offer, self.offer.account
        chosen = self.select()
        yield from self.agree_on_borders(chosen)
        wire = to_wire(chosen.values, wire_dtype(offer))
        sent = wire.to(account.c.dtype)
        account.write_off(chosen.positions, sent)
        bad = ~chosen.values.isfinite().all()
        owner = self.owners(chosen.positions)
        sums, flags = yield from send_to_owners(offer, Entries(chosen.positions, wire), owner, bad)
        used, non_finite = read_flags(flags)
        sums = sums.at(self.above_global(sums, used))
        rounded, lost = round_sums(offer, sums)
        gathered = yield from self.gather(rounded)
        winners = self.refresh_global(gathered)
        kept = mark(winners.positions, offer.codec.table.numel)
        account.give_back(chosen.positions, torch.where(kept[chosen.positions], 0.0, sent))
        account.give_back(sums.positions, torch.where(kept[sums.positions], lost, 0.0))
        update = zero_update(offer)
        update[winners.positions] = winners.values.to(update.dtype)
        self.nudge(chosen.positions, winners.positions)
        non_finite = non_finite | ~update.isfinite().all()
        slots = slot_of(chosen.positions, offer.codec.table)
        counts = count_by_slot(torch.ones_like(slots), slots, offer.codec.table)
        return Outcome(update.mul_(1 / offer.place.world), non_finite, sent=counts)

    def fresh(self, index: int) -> bool:
        """Whether this slot finds its thresholds anew now; the same on all ranks."""
        return self.states[index].count % self.setting.tau_prime == 0

    def select(self) -> Entries:
        """A: entries at or above the local threshold, by rising position."""
        c = self.offer.account.c
        magnitude = c.abs()
        spans = [rows.slot.span(magnitude) for rows in self.rows]
        self.find_local(spans)
        reached = torch.zeros_like(c, dtype=torch.bool)
        for rows, state, span in zip(self.rows, self.states, spans, strict=True):
            torch.ge(span, state.local, out=rows.slot.span(reached))
        # Zeros stay at home even where the threshold is 0: they would add nothing.
        positions = (reached & (magnitude != 0)).nonzero().view(-1)
        return Entries(positions, c[positions])

    def find_local(self, spans: Sequence[Tensor]) -> None:
        """The local thresholds, anew or raised; the host reads those of all slots at once."""
        setting = self.setting
        some = [index for index, rows in enumerate(self.rows) if rows.entries]
        fresh = [index for index in some if self.fresh(index)]
        if fresh:
            kth = [spans[index].topk(self.rows[index].entries).values[-1] for index in fresh]
            for index, threshold in zip(fresh, torch.stack(kth).tolist(), strict=True):
                self.states[index].local = threshold
        high = [index for index in some if index not in fresh]
        for _ in range(setting.clamp_times if high else 0):
            counts = [(spans[index] >= self.states[index].local).sum() for index in high]
            high = [
                index
                for index, count in zip(high, torch.stack(counts).tolist(), strict=True)
                if count > setting.clamp_above * self.rows[index].entries
            ]
            if not high:
                break
            for index in high:
                self.states[index].local *= setting.clamp_factor

    def agree_on_borders(self, chosen: Entries) -> Program[None]:
        """B: the mean over ranks of where each would cut its own entries into equal shares."""
        world = self.offer.place.world
        due = [
            index for index, state in enumerate(self.states) if state.count % self.setting.tau == 0
        ]
        if not due:
            return
        proposals = torch.cat([self.propose_borders(index, chosen.positions) for index in due])
        phase = f"{self.offer.phase}/borders"
        (total,) = yield (Sum(proposals, phase, control_bytes=proposals.nbytes),)
        for index, cuts in zip(due, (total // world).view(len(due), -1).tolist(), strict=True):
            self.states[index].cuts = cuts

    def propose_borders(self, index: int, positions: Tensor) -> Tensor:
        world, slot = self.offer.place.world, self.rows[index].slot
        start = int(torch.searchsorted(positions, slot.offset))
        stop = int(torch.searchsorted(positions, slot.offset + slot.numel))
        parts = torch.arange(1, world, device=positions.device)
        if stop - start < world:
            return slot.numel * parts // world
        return positions[start + (stop - start) * parts // world] - slot.offset

    def owners(self, positions: Tensor) -> Tensor:
        """C: whose region each position lies in."""
        cuts = [
            rows.slot.offset + cut
            for rows, state in zip(self.rows, self.states, strict=True)
            for cut in state.cuts
        ]
        before = torch.searchsorted(
            torch.tensor(cuts, dtype=torch.int64, device=positions.device), positions, right=True
        )
        # All cuts of the slots before its own lie before a position, too.
        return before - slot_of(positions, self.offer.codec.table) * (self.offer.place.world - 1)

    def above_global(self, sums: Entries, used: Tensor) -> Tensor:
        """D: sums at or above the reused global threshold; all of them where it is found anew."""
        device = sums.values.device
        limits = [0.0 if self.fresh(index) else s.global_ for index, s in enumerate(self.states)]
        slots = slot_of(sums.positions, self.offer.codec.table)
        bar = torch.tensor(limits, dtype=sums.values.dtype, device=device)[slots]
        return (sums.values.abs() >= bar) & used[slots]

    def gather(self, sums: Entries) -> Program[Entries]:
        """E: balance if skewed, then gather. A step that finds the threshold anew does not balance."""
        counts = yield from count_everywhere(self.offer, len(sums.positions))
        mean = sum(counts) / len(counts)
        if (
            not any(map(self.fresh, range(len(self.rows))))
            and max(counts) > self.setting.skew * mean
        ):
            sums, counts = yield from balance(self.offer, sums, counts)
        gathered = yield from gather_entries(self.offer, sums, counts)
        return gathered

    def refresh_global(self, gathered: Entries) -> Entries:
        """The exact k largest of every slot that finds its threshold anew; everything gathered of the others."""
        slots = slot_of(gathered.positions, self.offer.codec.table)
        keep = torch.ones_like(slots, dtype=torch.bool)
        for index, (rows, state) in enumerate(zip(self.rows, self.states, strict=True)):
            if not self.fresh(index):
                continue
            mine = (slots == index).nonzero().view(-1)
            magnitude = gathered.values[mine].abs().float()
            order = magnitude.sort(descending=True, stable=True).indices
            keep[mine[order[rows.entries :]]] = False
            best = order[: rows.entries]
            state.global_ = float(magnitude[best[-1]]) if len(best) else 0.0
        return gathered.at(keep)

    def nudge(self, selected: Tensor, winners: Tensor) -> None:
        """G: move reused thresholds towards k entries; takes effect at the next exchange."""
        setting, table = self.setting, self.offer.codec.table
        slots = slot_of(selected, table)
        mine = count_by_slot(torch.ones_like(slots), slots, table).tolist()
        slots = slot_of(winners, table)
        all_ = count_by_slot(torch.ones_like(slots), slots, table).tolist()
        for index, (rows, state) in enumerate(zip(self.rows, self.states, strict=True)):
            k = max(1, rows.entries)
            state.local *= step_towards(mine[index] / k, setting.local_band, setting.local_factor)
            if not self.fresh(index):
                state.global_ *= step_towards(
                    all_[index] / k, setting.global_band, setting.global_factor
                )
            state.count += 1


def check_at_least_one(field: str, value: Any) -> None:
    check_finite_number(field, value)
    if value < 1:
        raise UsageError(f"{field} is {value!r}; it must be a number of at least 1")


def check_band(field: str, value: Any) -> None:
    """Of counts, as multiples of k: k itself has to lie in it."""
    pair = isinstance(value, tuple) and len(value) == 2
    if (
        not pair
        or not all(isinstance(end, int | float) for end in value)
        or not value[0] <= 1 <= value[1]
    ):
        raise UsageError(f"{field} is {value!r}; it must be a pair of numbers around 1")


def mark(positions: Tensor, numel: int) -> Tensor:
    """bool [numel], set at `positions`, in whatever order they come."""
    kept = torch.zeros(numel, dtype=torch.bool, device=positions.device)
    kept[positions] = True
    return kept


def step_towards(ratio: float, band: tuple[float, float], factor: float) -> float:
    """What to multiply a threshold with when it selected `ratio` x k entries."""
    if ratio < band[0]:
        return 1 / factor
    return factor if ratio > band[1] else 1.0
