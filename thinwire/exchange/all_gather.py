"""All-gather exchanges: every rank receives every rank's payload and adds them in rank order.

`AllGather` adds the entries straight into one buffer: O(n + world x k). `AllGatherPlain` is the form that the papers
write down (decompress each payload, sum dense tensors): O(world x n). Same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.base import Exchange, Offer, Outcome
from thinwire.exchange.requests import Gather, Place, Program, common
from thinwire.wire.codec import Codec, Header

GATHERED_PAYLOADS = "all payloads, added in rank order"
"""The form of exchanges whose `gather` brings every rank's payload to every rank, and that then do what `AllGather` does."""


@dataclass(frozen=True)
class AllGather(Exchange):
    """All entries of all ranks added into one buffer, one pass per rank.

    1. Encode this rank's picks and write them off.
    2. Gather all payloads.
    3. Add the entries of rank 0, then rank 1, ...: distinct places within a rank, so no order is left open.
    4. Divide by the number of ranks.
    Slots no rank had a gradient for get no update, and their entries return to memory.
    """

    form = GATHERED_PAYLOADS
    keeps_choice = True
    computed_by = (*Exchange.computed_by, "combine")

    def gather(
        self, payload: Tensor, place: Place, *, phase: str, control_bytes: int
    ) -> Program[Tensor]:
        """uint8 [world, n]: every rank's payload of n bytes. Kernels bring theirs along this way too."""
        if place.world == 1:
            return payload[None]
        (gathered,) = yield (Gather(payload, phase, control_bytes=control_bytes, apart=True),)
        return gathered

    def run(self, offer: Offer) -> Program[Outcome]:
        picks = offer.pick()
        payload, sent = offer.codec.encode(picks, offer.flags)
        positions = offer.codec.table.positions(picks.indices)
        offer.account.write_off(positions, sent, held=picks.values)
        gathered = yield from self.gather(
            payload, offer.place, phase=offer.phase, control_bytes=offer.codec.control_bytes
        )
        header, used, update = yield from common(lambda: self._read(gathered, offer))
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
class AllGatherPlain(AllGather):
    """Split, decompress each rank's payload to a dense tensor, sum in rank order."""

    def combine(self, gathered: Tensor, used: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
        update = torch.zeros(codec.table.numel, dtype=dtype, device=gathered.device)
        for payload in gathered:
            positions, values = codec.decode(payload)
            one_rank = torch.zeros_like(update)
            one_rank.index_add_(0, positions, torch.where(used, values, 0.0).to(dtype))
            update += one_rank
        return update
