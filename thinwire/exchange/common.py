"""What the exchanges that add values on the way share: rounding to the wire, flags, and the case of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.exchange.base import Offer, Outcome
from thinwire.exchange.requests import Program, Request, Sum
from thinwire.layout import RowTable, remembered

INDEX_DTYPE = torch.int32
NO_ENTRY = -1
"""The index that fills places no entry took."""


def wire_dtype(offer: Offer) -> torch.dtype:
    code = offer.codec.values
    if code.dtype is None:
        raise ExchangeError(
            f"values is {code.name!r}; an exchange that adds on the way takes 'fp32', 'bf16' or 'fp16'"
        )
    return code.dtype


def to_wire(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the wire's dtype; values beyond its range become its largest finite number."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, bytes] as [rows, numbers]."""
    rows, width = raw.shape
    # Flat first: a single row keeps the stride of the message it was cut from, which a typed view refuses.
    return raw.reshape(-1).view(dtype).view(rows, width // dtype.itemsize)


def any_non_finite(values: Tensor) -> Tensor:
    """bool [...]: whether anything in the last dimension is not finite."""
    # 0 times anything but a finite number is not 0: half the operations of `isfinite`.
    return (values * 0).sum(-1) != 0


def slot_of(positions: Tensor, table: RowTable) -> Tensor:
    """Which slot each flat position belongs to."""
    device = positions.device
    starts = remembered(
        table,
        ("starts", device),
        lambda: torch.tensor([rows.slot.offset for rows in table.rows], device=device),
    )
    return torch.bucketize(positions, starts, right=True) - 1


def count_by_slot(taken: Tensor, slots: Tensor, table: RowTable) -> Tensor:
    """int64 [slots]: how many of the entries that are `taken` each slot has."""
    counts = torch.zeros(len(table.rows), dtype=torch.int64, device=taken.device)
    return counts.scatter_add_(0, slots.long(), taken.long())


def zero_update(offer: Offer) -> Tensor:
    c = offer.account.c
    return torch.zeros(offer.codec.table.numel, dtype=c.dtype, device=c.device)


def deliver_mean(
    offer: Offer, positions: Tensor, sums: Tensor, non_finite: Tensor, sent: Tensor
) -> Outcome:
    """The mean of sums over ranks at flat positions, each once; what is outside the group is nowhere. `sent` counts this rank's
    entries."""
    sums = sums.to(offer.account.c.dtype)
    if offer.deliver is not None:
        update, wrong = offer.deliver(positions, sums)
        return Outcome(update, non_finite | wrong, sent=sent, delivered=True)
    numel = offer.codec.table.numel
    inside = (positions >= 0) & (positions < numel)
    means = torch.where(inside, sums, 0.0) * (1 / offer.place.world)
    # One element more than the group: the dump of what is nowhere.
    update = torch.zeros(numel + 1, dtype=means.dtype, device=means.device)
    update.scatter_(0, torch.where(inside, positions, numel), means)
    return Outcome(update[:-1], non_finite | any_non_finite(means), sent=sent)


def travelling(empty: Tensor, rank: int) -> Tensor:
    """Padding per destination [world] as the `padding_bytes` of an all-to-all, whose own row stays at home."""
    world = empty.numel()
    return (empty.sum() - empty[rank]) * (world / max(1, world - 1))


def flags_request(offer: Offer, bad: Tensor | None = None) -> Sum:
    """Which slots had a gradient on some rank, and whether anything was not finite anywhere.

    In the dtype of the gradients, so that it shares the sum of those that travel whole.
    """
    non_finite = offer.flags.non_finite if bad is None else offer.flags.non_finite | bad
    words = torch.cat([offer.flags.had_gradient, non_finite[None]]).to(offer.account.c.dtype)
    return sum_of_flags(words, offer.phase)


def sum_of_flags(words: Tensor, phase: str) -> Sum:
    """Of numbers that are not 0 where a slot had a gradient and, the last one, if something was not finite."""
    return Sum(words, f"{phase}/flags", control_bytes=words.nbytes)


def ask(request: Request) -> Program[Any]:
    """One request as a program."""
    (reply,) = yield (request,)
    return reply


def read_flags(reply: Tensor) -> tuple[Tensor, Tensor]:
    """(used slots, non-finite) out of the summed flags."""
    return reply[:-1] > 0, reply[-1] > 0


def keep_alone(offer: Offer) -> Outcome:
    """One rank: nothing travels, but selection, rounding and memory run as they would among many."""
    table = offer.codec.table
    picks = offer.pick()
    positions = table.positions(picks.indices)
    sent = to_wire(picks.values, wire_dtype(offer)).to(offer.account.c.dtype)
    bad = ~picks.values.isfinite().all()
    offer.account.write_off(positions, sent)
    slots = table.entry_slots(positions.device).long()
    used = offer.flags.had_gradient[slots]
    offer.account.give_back(positions, torch.where(used, 0.0, sent))
    accepted = torch.where(used, sent, 0.0)
    update = zero_update(offer).index_add_(0, positions, accepted)
    counts = count_by_slot(sent != 0, slots, table)
    return Outcome(update, offer.flags.non_finite | bad, sent=counts)
