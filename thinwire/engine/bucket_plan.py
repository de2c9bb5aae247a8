"""BucketPlan: the way of one bucket from local gradient to mean update, decided when its layout is first seen.

What is the same in every step is found once: which slots travel together, which backend does the work of each group, what
travels beside what, and in what order. Methods that take turns have a few ways, one for every combination of modes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import (
    BUCKET_ALIGNMENT,
    Compressor,
    GroupPlan,
    GroupStep,
    Opened,
    Route,
    Terms,
)
from thinwire.engine.assignments import Assignment
from thinwire.engine.fusing import fuse_requests
from thinwire.engine.step import StepRecord
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Place, Program, together
from thinwire.kernels.inspection import any_of, is_any_non_finite
from thinwire.layout import BucketLayout, Group, Slot
from thinwire.observe.stats import Tally, TrafficRow, WayTraffic

BadDelivery = Callable[[Tensor, Tensor], None]
"""What is done to a bucket (first) if a flag on its device (second) is up."""


def deliver_nothing(layout: BucketLayout) -> BadDelivery:
    """A bad step's buckets hold zeros: for callers that apply updates without a look at them."""

    def clear(flat: Tensor, bad: Tensor) -> None:
        for begin, count in layout.buffers:
            part = flat[begin : begin + count]
            part.copy_(torch.where(bad, 0.0, part))

    return clear


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """The slots of a bucket that one compressor has."""

    plan: GroupPlan
    members: Sequence[Assignment]

    @property
    def group(self) -> Group:
        return self.plan.group


@dataclass(frozen=True, eq=False)
class Way:
    """How the groups of a bucket travel in one combination of modes."""

    routes: Sequence[Route]
    """One per group, dense first."""
    traffic: WayTraffic
    nbytes: float
    """What this rank is expected to send for the whole bucket."""


class BucketPlan:
    """One bucket layout under one assignment of compressors to parameters."""

    most_ways = 16
    """Ways that are kept. Slots that change modes one by one make new combinations for as long as training lasts."""

    def __init__(
        self,
        layout: BucketLayout,
        assignments: dict[str, Assignment],
        place: Place,
        *,
        deterministic: bool,
        aligned: bool,
        when_bad: BadDelivery,
        tally: Tally,
    ) -> None:
        self.layout = layout
        self.names = frozenset(slot.name for slot in layout.slots)
        first, *others = [slot.name for slot in layout.slots]
        self.title = f"{first} and {len(others)} more" if others else first
        self.assignments = [assignments[slot.name] for slot in layout.slots]
        self.aligned = aligned
        self._place = place
        self._when_bad = when_bad
        self._tally = tally
        terms = Terms(place, layout.dtype, aligned, deterministic)
        self.groups = cut_into_groups(layout, assignments, terms)
        self.ways: dict[tuple[Hashable, ...], Way] = {}

    # -- one step ----------------------------------------------------------------------------------------------

    def open(self, flat: Tensor, record: StepRecord) -> tuple[Program[Tensor], float]:
        """(what is left to do with the bucket, bytes this rank sends for it).

        Groups are opened last to first: dense ones, which come first, may travel in what others have made.
        """
        counts = [[member.exchanges for member in one.members] for one in self.groups]
        way = self._way(counts)
        opened: list[Opened] = []
        for index in reversed(range(len(way.routes))):
            one = way.routes[index].open(GroupStep(flat, counts[index], record.scale))
            opened.insert(0, one)
            # At once: if another group cannot be opened, what this one took out of memory has to return.
            if one.account is not None:
                record.add_account(one.account, self.groups[index].group)
        for assignment in self.assignments:
            assignment.exchanges += 1
        record.buckets += 1
        return self._run(flat, way, opened, record), way.nbytes

    def _way(self, counts: Sequence[Sequence[int]]) -> Way:
        pairs = zip(self.groups, counts, strict=True)
        modes = tuple(one.plan.begin(count) for one, count in pairs)
        way = self.ways.get(modes)
        if way is None:
            if len(self.ways) >= self.most_ways:
                del self.ways[next(iter(self.ways))]
            way = self.ways[modes] = self._find_way(modes)
        elif len(self.ways) > 1:
            # Those used last stay.
            self.ways[modes] = self.ways.pop(modes)
        return way

    def _find_way(self, modes: Sequence[Hashable]) -> Way:
        routes: list[Route] = []
        for one, mode in reversed(list(zip(self.groups, modes, strict=True))):
            routes = one.plan.join(mode, routes)
        world = self._place.world
        dense_share = 2 * (world - 1) / world * self.layout.dtype.itemsize
        rows = [
            TrafficRow(
                slot.name,
                slot.numel,
                route.slot_bytes[index],
                None if route.entries is None else route.entries[index],
                route.compressed,
            )
            for route in routes
            for index, slot in enumerate(route.group.slots)
        ]
        nbytes = sum(sum(route.slot_bytes) for route in routes)
        return Way(routes, WayTraffic(rows, dense_share), nbytes)

    def _run(
        self, flat: Tensor, way: Way, opened: Sequence[Opened], record: StepRecord
    ) -> Program[Tensor]:
        """Run the groups' exchanges side by side, deliver the updates, and say whether the bucket is bad."""
        side_by_side = together([one.program for one in opened])
        counted = self._tally.count(side_by_side, way.traffic)
        outcomes: list[Outcome] = yield from fuse_requests(counted)
        verdicts: list[Tensor] = [] if record.unscalable is None else [record.unscalable]
        for route, one, outcome in zip(way.routes, opened, outcomes, strict=True):
            if one.finish is not None:
                outcome = one.finish(outcome)
            # A group that was carried along has its carrier's flag.
            if not any(outcome.non_finite is other for other in verdicts):
                verdicts.append(outcome.non_finite)
            if not outcome.delivered:
                verdicts.append(deliver(route.group, one, outcome.update, flat))
            if route.entries is None:
                self._count(route.group, outcome)
        # A bucket of parameters without elements has no groups.
        bad = any_of(verdicts) if verdicts else flat.new_zeros((), dtype=torch.bool)
        self._when_bad(flat, bad)
        record.bad.append(bad)
        return flat

    def _count(self, group: Group, outcome: Outcome) -> None:
        if outcome.sent is not None:
            self._tally.add_counts(group, outcome.sent)
        elif outcome.header is not None:
            self._tally.add_counts(group, outcome.header.counts[self._place.rank])

    @property
    def routes(self) -> Sequence[Route]:
        """Those of the last step, one per group, dense first; none before the first."""
        return self.ways[next(reversed(self.ways))].routes if self.ways else ()


def backends_of(routes: Iterable[Route]) -> dict[str, str]:
    """Who does the work of each parameter, and why nobody faster does."""
    return {
        slot.name: ": ".join(filter(None, (route.backend, route.objection)))
        for route in routes
        for slot in route.group.slots
    }


def deliver(group: Group, one: Opened, update: Tensor, flat: Tensor) -> Tensor:
    """Write a group's update into the bucket; bool []: something in it is not finite."""
    group.deliver(update, flat)
    if one.account is not None and flat.dtype != update.dtype:
        one.account.bank(group.rounding(update, flat))
    # The sum of finite gradients, or its cast to a narrower dtype, can overflow.
    return is_any_non_finite(group, update, flat)


def cut_into_groups(
    layout: BucketLayout, assignments: dict[str, Assignment], terms: Terms
) -> list[PlannedGroup]:
    """One group per compressor, dense first."""
    members: dict[Compressor, list[Slot]] = {}
    for slot in layout.slots:
        if slot.numel:
            members.setdefault(assignments[slot.name].compressor, []).append(slot)
    groups = []
    for compressor in sorted(members, key=lambda one: not one.travels_whole):
        slots = members[compressor]
        group = Group.of(layout, slots, compressor.working_dtype(layout.dtype))
        owners = [assignments[slot.name] for slot in slots]
        groups.append(PlannedGroup(compressor.plan(group, terms), owners))
    return groups


def is_aligned(flat: Tensor) -> bool:
    return flat.data_ptr() % BUCKET_ALIGNMENT == 0
