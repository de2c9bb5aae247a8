"""All-gather exchanges: every rank receives every rank's payload and adds them in rank order.

`AllGather` is the plain form (decompress each, sum dense tensors), `AllGatherFast` adds the entries straight
into one buffer: O(n + world x k) instead of O(world x n). Same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange import requests
from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.lockstep import alike
from thinwire.exchange.requests import Program
from thinwire.wire.codec import Codec, Header


@dataclass(frozen=True)
class AllGatherFast(Exchange):
    """All entries of all ranks added into one buffer, one pass per rank.

    1. Encode this rank's picks and write them off.
    2. Gather all payloads.
    3. Add the entries of rank 0, then rank 1, ...: distinct places within a rank, so no order is left open.
    4. Divide by the number of ranks.
    Slots no rank had a gradient for get no update, and their entries return to memory.
    """

    def run(self, offer: Offer) -> Program[Outcome]:
        picks = offer.pick()
        payload, sent = offer.codec.encode(picks, offer.flags)
        positions = offer.codec.table.positions(picks.indices)
        offer.account.write_off(positions, sent, held=picks.values)
        gathered = yield from gather_payloads(payload, offer)
        header, used, update = alike(gathered, lambda: self._read(gathered, offer))
        offer.account.give_back(positions, torch.where(used, 0.0, sent))
        return Outcome(update, header.non_finite.any(), header)

    def _read(self, gathered: Tensor, offer: Offer) -> tuple[Header, Tensor, Tensor]:
        """(headers, which entries are used, mean update)."""
        codec = offer.codec
        header = codec.read_headers(gathered)
        used = header.had_gradient.any(0)[codec.table.entry_slots(gathered.device).long()]
        update = self.combine(gathered, used, codec, offer.account.c.dtype)
        return header, used, update.mul_(1 / offer.place.world)

    def combine(self, gathered: Tensor, used: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
        """Sum of all ranks' entries as one dense flat tensor."""
        update = torch.zeros(codec.table.numel, dtype=dtype, device=gathered.device)
        for payload in gathered:
            positions, values = codec.decode(payload)
            update.index_add_(0, positions, torch.where(used, values, 0.0).to(dtype))
        return update


@dataclass(frozen=True)
class AllGather(AllGatherFast):
    """Split, decompress each rank's payload to a dense tensor, sum in rank order."""

    def combine(self, gathered: Tensor, used: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
        update = torch.zeros(codec.table.numel, dtype=dtype, device=gathered.device)
        for payload in gathered:
            positions, values = codec.decode(payload)
            one_rank = torch.zeros_like(update)
            one_rank.index_add_(0, positions, torch.where(used, values, 0.0).to(dtype))
            update += one_rank
        return update


def gather_payloads(payload: Tensor, offer: Offer) -> Program[Tensor]:
    """[world, nbytes] of all ranks; at world 1 nothing travels."""
    if offer.place.world == 1:
        return payload[None]
    control = offer.codec.control_bytes
    (gathered,) = yield (requests.AllGather(payload, offer.phase, control, apart=True),)
    return gathered
