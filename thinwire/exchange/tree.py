"""gTopk: merges of two lists that keep k entries.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks" (ICDCS'19).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.common import (
    NO_ENTRY,
    any_non_finite,
    count_by_slot,
    deliver_mean,
    flags_request,
    keep_alone,
    read_flags,
    to_wire,
    wire_dtype,
)
from thinwire.exchange.places import (
    INDEX_BYTES,
    Places,
    add_arrived,
    largest_sums,
    pack,
    propose,
    unpack,
)
from thinwire.exchange.regions import WholeRegion
from thinwire.exchange.requests import Place, Program, Sum, Swap
from thinwire.layout import RowTable, remembered
from thinwire.validate import check_bool

MERGED_ENTRIES = "entries that Offer.pick chose, in lists that are merged two at a time"
"""The form of `TreeMerge`."""


@dataclass(frozen=True, kw_only=True)
class TreeMerge(Exchange):
    """gTopk. A rank sends 2k log2 P words where P is a power of two, otherwise at most 2k (log2 Q + 2), Q being the next one below.

    1. Rank Q + r and rank r send each other their k entries. Both add equal places and keep the k largest of every slot, ties to the
       lowest position.
    2. So do ranks below Q whose numbers differ in the lowest bit, then in the next, and so on. All end with the same list.
    3. Rank r sends the list to rank Q + r.

    The paper merges towards rank 0 and sends the result back down the same tree. Where P is a power of two that is the same list with
    32-bit values, in twice the rounds.

    As published (`conserve=False`) a rank takes back what it selected and does not find in the final list. That loses a
    contribution dropped at a merge if its place wins elsewhere: lossy by design. With `conserve=True` a rank clears
    everything it handed over, and one of those that make the same merge keeps what it drops in its own memory: nothing is lost.
    """

    conserve: bool = True
    """Whether sums that a merge drops are kept in memory, so that nothing is lost."""

    form = MERGED_ENTRIES
    sums_on_the_way = True

    def __post_init__(self) -> None:
        check_bool("conserve", self.conserve)

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        whole = largest_power(world)
        messages = whole.bit_length() - 1 + (2 if world > whole else 0)
        return messages * (32 + value_bits)

    def run(self, offer: Offer) -> Program[Outcome]:
        if offer.place.world == 1:
            return keep_alone(offer)
        outcome = yield from MergeStep(self, offer).run()
        return outcome


# -- who merges with whom ---------------------------------------------------------------------------------------------


def largest_power(world: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << world.bit_length() - 1


@dataclass(frozen=True)
class Meeting:
    """One round of merges, as a rank sees it."""

    name: str
    partner: int | None
    """With whom lists are exchanged; None if this rank has nobody."""
    keeps: bool
    """Whether what the merge leaves over goes to this rank's memory: of all that make the same merge to one, and to no rank twice."""


def meetings(place: Place) -> Iterator[Meeting]:
    """In order."""
    rank, whole = place.rank, largest_power(place.world)
    if place.world > whole:
        other = rank ^ whole
        yield Meeting("outside", other if other < place.world else None, rank >= whole)
    reach = 1
    while reach < whole:
        inside = rank < whole
        last = rank % (2 * reach) == reach - 1
        yield Meeting(f"reach {reach}", rank ^ reach if inside else None, inside and last)
        reach *= 2


class OwnList(Protocol):
    """The list of one rank."""

    message: Tensor
    """uint8 [bytes]: as it is sent."""
    padding: Tensor
    """How many of them are empty places."""

    def learn(self, flags: Tensor) -> None:
        """The flags of all ranks, summed."""

    def merge(self, theirs: Tensor, meeting: Meeting) -> None:
        """Become the merged list."""


def merge_lists(own: OwnList, flags: Sum, place: Place, phase: str) -> Program[None]:
    """All ranks end with the same list. Flags travel beside the first messages."""
    beside: tuple[Sum, ...] = (flags,)
    for meeting in meetings(place):
        other = meeting.partner
        *told, theirs = yield (*beside, swap(own, f"{phase}/merge", other, other, meeting.name))
        for reply in told:
            own.learn(reply)
        beside = ()
        if other is not None:
            own.merge(theirs, meeting)
    rank, whole = place.rank, largest_power(place.world)
    if place.world > whole:
        to = rank + whole if rank + whole < place.world else None
        source = rank - whole if rank >= whole else None
        (final,) = yield (swap(own, f"{phase}/spread", to, source, "spread"),)
        if source is not None:
            own.message = final


def swap(own: OwnList, phase: str, to: int | None, source: int | None, pattern: str) -> Swap:
    padding = own.padding
    return Swap(own.message, phase, padding_bytes=padding, to=to, source=source, pattern=pattern)


# -- lists ------------------------------------------------------------------------------------------------------------


def list_places(table: RowTable, device: torch.device) -> Places:
    """As many as a group may keep entries, those of a slot side by side."""

    def make() -> Places:
        counts = [rows.entries for rows in table.rows]
        return Places(WholeRegion(table, device), counts, world=1)

    return remembered(table, ("list", device), make)


class MergeStep:
    """One exchange of one group. A list is in the order of positions within a slot, empty places last."""

    def __init__(self, setting: TreeMerge, offer: Offer) -> None:
        self.offer, self.conserve = offer, setting.conserve
        self.table = offer.codec.table
        self.wire = wire_dtype(offer)
        self.sum_dtype, self.device = offer.account.c.dtype, offer.account.c.device
        self.places = list_places(self.table, self.device)
        self.left: tuple[Tensor, Tensor] | None = None
        """Flat positions and sums that merges left over for this rank's memory."""

    def run(self) -> Program[Outcome]:
        offer, account, places = self.offer, self.offer.account, self.places
        picks = offer.pick()
        positions = self.table.positions(picks.indices)
        slots = self.table.entry_slots(self.device).long()
        wire = to_wire(picks.values, self.wire)
        sent = wire.to(self.sum_dtype)
        account.write_off(positions, sent, held=picks.values)
        listed = propose(wire, *places.regions.locate(positions, slots), places)
        self.write(listed.indices[0], listed.values[0])
        flags = flags_request(offer, any_non_finite(picks.values))
        yield from merge_lists(self, flags, offer.place, offer.phase)
        final, values = self.read(self.message)
        stays = self.used[slots] if self.conserve else self.find(final)[positions]
        account.give_back(positions, torch.where(stays, 0.0, sent))
        if self.left is not None:
            account.give_back(*self.left)
        counts = count_by_slot(sent != 0, slots, self.table)
        return deliver_mean(offer, final.long(), values, self.non_finite, counts)

    def learn(self, flags: Tensor) -> None:
        self.used, self.non_finite = read_flags(flags)

    def merge(self, theirs: Tensor, meeting: Meeting) -> None:
        """Add equal places and keep each slot's largest, as the wire rounds them."""
        indices, values = self.read(torch.stack([self.message, theirs]))
        # A slot that no rank had a gradient for keeps nothing.
        indices = torch.where(self.used[self.places.slots], indices, NO_ENTRY)
        sums = add_arrived(indices, values, self.table.numel, self.sum_dtype)
        kept = largest_sums(sums, indices, self.places, self.places)
        # Empty places read the dump, which is zero.
        exact = sums[kept.long() + 1]
        rounded = to_wire(exact, self.wire)
        self.write(kept, rounded)
        if meeting.keeps and (self.conserve or self.wire != self.sum_dtype):
            self.keep_left(sums, indices, kept, exact - rounded)

    def keep_left(self, sums: Tensor, indices: Tensor, kept: Tensor, lost: Tensor) -> None:
        """What rounding `lost` of sums that stay in the list, and all others if nothing may be lost."""
        positions = kept
        if self.conserve:
            sums.scatter_(0, kept.long() + 1, lost)
            mine, theirs = indices.long() + 1
            first = sums[mine]
            # A place that both have counts once.
            sums.index_fill_(0, mine, 0.0)
            positions, lost = indices.view(-1), torch.cat([first, sums[theirs]])
        self.left = positions.clamp(min=0).long(), torch.where(lost.isfinite(), lost, 0.0)

    def find(self, final: Tensor) -> Tensor:
        """bool [numel + 1]: which positions are in the final list. The last element is the dump of empty places."""
        found = torch.zeros(self.table.numel + 1, dtype=torch.bool, device=self.device)
        return found.index_fill_(0, torch.where(final >= 0, final, self.table.numel).long(), True)

    def write(self, indices: Tensor, values: Tensor) -> None:
        self.message = pack(indices, values)
        self.padding = (indices < 0).sum() * (INDEX_BYTES + self.wire.itemsize)

    def read(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """(int32 positions, values) of [..., bytes]."""
        return unpack(messages, self.wire, self.places.lowest, self.places.highest)
