"""Chunk exchange: norms first, then the chunks that all ranks chose from the summed norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.exchange.agreed import Told, ask_flags
from thinwire.exchange.base import Offer
from thinwire.exchange.common import ask
from thinwire.exchange.requests import Program, Sum, together
from thinwire.exchange.shared_indices import SharedIndices, places_of
from thinwire.select.base import Selector
from thinwire.select.chunks import chunks_of


@dataclass(frozen=True)
class ChunkAllReduce(SharedIndices):
    """No indices and no all-gather: bytes do not grow with the number of workers.

    1. Sum the L1 norms of all chunks over ranks, and beside them the flags.
    2. Choose chunks from the sums, ties to the lowest: the same on every rank.
    3. Sum the chosen chunks over ranks.
    """

    def objection(self, selector: Selector) -> str | None:
        return None if selector.in_chunks else "sends whole chunks, as tw.ChunkTopK chooses them"

    def agree(self, offer: Offer) -> Program[Tensor | tuple[Tensor, Told]]:
        c = offer.account.c
        chunks = chunks_of(offer.codec.table, c.device)
        norms = Sum(chunks.norms(c).float(), f"{offer.phase}/norms")
        told, total = yield from together([ask_flags(offer), ask(norms)])
        return places_of(offer, *chunks.choose(total)), told
