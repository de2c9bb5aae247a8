"""TopKDSA = TradTopK + Residual + SplitGather.

Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning" (SC'19).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.exchange.base import Exchange
from thinwire.exchange.dsa import SplitGather
from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK


@dataclass(frozen=True, kw_only=True)
class TopKDSA(Sparsifier):
    """Sums are formed at owners and all of them come back, as entries or, once there may be too many, as dense regions."""

    exchange: Exchange = field(default_factory=SplitGather)

    def selector(self) -> Selector:
        return TradTopK(self.kept)
