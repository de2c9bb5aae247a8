"""TopKA = TradTopK + Residual + AllGather with 32-bit values and indices: the plain all-gather baseline."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK


@dataclass(frozen=True, kw_only=True)
class TopKA(Sparsifier):
    """Every rank receives every rank's k entries: 2k(P-1) words, more than dense from about n/k workers on."""

    values: str = "fp32"
    indices: str = "int32"

    def selector(self) -> Selector:
        return TradTopK(self.kept)
