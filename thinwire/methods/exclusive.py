"""ExclusiveTopK = TradTopK + Residual + Exclusive: thinwire's own exchange for many workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.exchange.base import Exchange
from thinwire.exchange.exclusive import Exclusive
from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK


@dataclass(frozen=True, kw_only=True)
class ExclusiveTopK(Sparsifier):
    """Every rank selects in a rotating part of its own; all ranks' values at all chosen places are added.

    3k(P-1)/P words however many workers, and each rank selects in 1/P of the gradient.
    """

    exchange: Exchange = field(default_factory=Exclusive)

    def selector(self) -> Selector:
        return TradTopK(self.kept)
