"""Messages as long as the data make them: what the published sparse all-reduces send. The host reads every count.

An entry is the int32 flat position and the value in the wire's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.base import Offer
from thinwire.exchange.common import INDEX_DTYPE, flags_request, to_wire, typed, wire_dtype
from thinwire.exchange.requests import AllToAll, AllToAllUneven, Gather, Program


@dataclass(frozen=True, eq=False)
class Entries:
    """Flat positions (int64) and values, one each."""

    positions: Tensor
    values: Tensor

    def pack(self) -> Tensor:
        """uint8 [entries, bytes per entry]."""
        index = self.positions.to(INDEX_DTYPE)[:, None].contiguous().view(torch.uint8)
        return torch.cat([index, self.values[:, None].contiguous().view(torch.uint8)], 1)

    @staticmethod
    def unpack(rows: Tensor, dtype: torch.dtype) -> Entries:
        width = INDEX_DTYPE.itemsize
        index = typed(rows[:, :width], INDEX_DTYPE).view(-1)
        return Entries(index.long(), typed(rows[:, width:], dtype).view(-1))

    def at(self, chosen: Tensor) -> Entries:
        """Those at some places, or where a mask is True: the host then waits, once for both."""
        places = chosen.nonzero().view(-1) if chosen.dtype == torch.bool else chosen
        return Entries(self.positions[places], self.values[places])


def send_to_owners(
    offer: Offer, entries: Entries, owner: Tensor, bad: Tensor
) -> Program[tuple[Entries, Tensor]]:
    """(sums of what all ranks sent to this owner, by rising position; the flags of all ranks).

    1. Exchange how many entries go from whom to whom.
    2. Send each entry to its owner, this rank's own part to itself. What is owned by rank `world`, which is nobody, stays.
    3. Add in rank order.
    """
    world, rank = offer.place.world, offer.place.rank
    owner, order = owner.sort(stable=True)
    counts = torch.searchsorted(owner, torch.arange(world + 1, device=owner.device)).diff()
    control = AllToAll(
        counts[:, None].clone(), f"{offer.phase}/counts", control_bytes=counts.nbytes
    )
    flags, arriving = yield flags_request(offer, bad), control
    send, receive = torch.stack([counts, arriving.view(-1)]).tolist()
    request = AllToAllUneven(
        entries.at(order[: sum(send)]).pack(),
        f"{offer.phase}/split",
        send=tuple(send),
        receive=tuple(receive),
        rank=rank,
    )
    (rows,) = yield (request,)
    arrived = Entries.unpack(rows, entries.values.dtype)
    return add_up(arrived, offer.account.c.dtype, world), flags


def add_up(entries: Entries, dtype: torch.dtype, most: int) -> Entries:
    """One entry per position, rising; up to `most` entries of one position are added in the order they come in."""
    places, target = entries.positions.unique(return_inverse=True)
    sums = torch.zeros(places.numel(), dtype=dtype, device=places.device)
    if sums.device.type == "cpu":
        return Entries(places, sums.index_add_(0, target, entries.values.to(dtype)))
    # Atomics have no order, so on an accelerator equal positions take turns.
    order = target.argsort(stable=True)
    target, values = target[order], entries.values[order].to(dtype)
    first = torch.searchsorted(target, torch.arange(places.numel(), device=target.device))
    turn = torch.arange(target.numel(), device=target.device) - first[target]
    for now in range(most):
        sums.index_add_(0, target, torch.where(turn == now, values, 0.0))
    return Entries(places, sums)


def round_sums(offer: Offer, sums: Entries) -> tuple[Entries, Tensor]:
    """(entries as the wire rounds them, what that lost)."""
    rounded = to_wire(sums.values, wire_dtype(offer))
    lost = sums.values - rounded
    return Entries(sums.positions, rounded), torch.where(lost.isfinite(), lost, 0.0)


def count_everywhere(offer: Offer, count: int) -> Program[list[int]]:
    """How many entries each rank holds."""
    mine = torch.tensor([count], device=offer.account.c.device)
    (counts,) = yield (Gather(mine, f"{offer.phase}/counts", control_bytes=mine.nbytes),)
    return [int(number) for number in counts.view(-1).tolist()]


def gather_entries(offer: Offer, entries: Entries, counts: list[int]) -> Program[Entries]:
    """Everybody's entries, rank 0's first; messages are filled up to the longest."""
    rows = entries.pack()
    # Gloo refuses empty tensors, so at least one entry travels.
    longest = max(1, *counts)
    message = torch.zeros(longest, rows.shape[1], dtype=torch.uint8, device=rows.device)
    message[: len(rows)] = rows
    padding = (longest - len(rows)) * rows.shape[1]
    request = Gather(message.view(-1), f"{offer.phase}/gather", padding_bytes=padding)
    (gathered,) = yield (request,)
    parts = gathered.view(len(counts), longest, -1)
    kept = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return Entries.unpack(kept, entries.values.dtype)


def balance(
    offer: Offer, entries: Entries, counts: list[int]
) -> Program[tuple[Entries, list[int]]]:
    """Move entries between neighbouring ranks until all hold the same number; their order stays.

    Old and new intervals of the concatenated list are known to everybody, so their overlaps are the splits and
    nothing has to be asked.
    """
    world, rank = offer.place.world, offer.place.rank
    old = [sum(counts[:r]) for r in range(world + 1)]
    new = [old[-1] * r // world for r in range(world + 1)]
    request = AllToAllUneven(
        entries.pack(),
        f"{offer.phase}/balance",
        send=tuple(overlap(old, rank, new, other) for other in range(world)),
        receive=tuple(overlap(old, other, new, rank) for other in range(world)),
        rank=rank,
    )
    (rows,) = yield (request,)
    sizes = [new[r + 1] - new[r] for r in range(world)]
    return Entries.unpack(rows, entries.values.dtype), sizes


def overlap(old: list[int], source: int, new: list[int], target: int) -> int:
    """How many numbers interval `source` of `old` and interval `target` of `new` share."""
    return max(0, min(old[source + 1], new[target + 1]) - max(old[source], new[target]))
