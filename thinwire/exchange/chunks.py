"""Chunk exchange: norms first, then the chunks that all ranks chose from the summed norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.exchange.base import Offer, Outcome
from thinwire.exchange.requests import Program
from thinwire.exchange.shared_indices import SharedIndices, sum_flags, sum_values
from thinwire.select.base import Selector
from thinwire.select.chunks import chunks_of


@dataclass(frozen=True)
class ChunkAllReduce(SharedIndices):
    """No indices and no all-gather: bytes do not grow with the number of workers.

    1. Sum the L1 norms of all chunks over ranks.
    2. Choose chunks from the sums, ties to the lowest: the same on every rank.
    3. Sum the chosen chunks over ranks.
    """

    def objection(self, selector: Selector) -> str | None:
        return None if selector.in_chunks else "sends whole chunks, as tw.ChunkTopK chooses them"

    def run(self, offer: Offer) -> Program[Outcome]:
        had_gradient, non_finite = yield from sum_flags(offer.flags, offer.place, offer.phase)
        table, c = offer.codec.table, offer.account.c
        chunks = chunks_of(table, c.device)
        total, _ = yield from sum_values(
            chunks.norms(c).float(), table, offer.place, torch.float32, f"{offer.phase}/norms"
        )
        picks = chunks.pick(c, total)
        return (yield from self.exchange_picks(offer, picks, had_gradient, non_finite))
