"""TopK = TradTopK + Residual + AllGather: the k largest magnitudes of each tensor."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK


@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Traditional top-k with error feedback, per tensor."""

    def selector(self) -> Selector:
        return TradTopK(self.kept)
