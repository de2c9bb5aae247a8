"""OkTopK = TradTopK + Residual + SplitReduce.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP'22).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.errors import UsageError
from thinwire.exchange.base import Exchange
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce
from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK
from thinwire.validate import check_choice

EXACT = SplitReduce()
"""The exchange of an `OkTopK` that was given none: it follows `thresholds`."""


@dataclass(frozen=True, kw_only=True)
class OkTopK(Sparsifier):
    """Sparse all-reduce whose traffic does not grow with the number of workers.

    With `thresholds="exact"` every step stays within 6k(P-1)/P words and never makes the host wait. "published" reuses
    thresholds and borders as the paper does; what it really sends is in the ledger.
    """

    thresholds: Literal["exact", "published"] = "exact"
    """Find thresholds exactly at every step, or reuse them for the paper's periods."""
    exchange: Exchange = EXACT
    """SplitReduce() with other settings, or ReusedThresholds() with other periods."""

    def __post_init__(self) -> None:
        check_choice("thresholds", self.thresholds, ("exact", "published"))
        if self.thresholds == "published" and self.exchange is EXACT:
            object.__setattr__(self, "exchange", ReusedThresholds())
        super().__post_init__()
        wanted = SplitReduce if self.thresholds == "exact" else ReusedThresholds
        if not isinstance(self.exchange, wanted):
            raise UsageError(
                f"exchange is {self.exchange!r}; with thresholds={self.thresholds!r} it must be a {wanted.__name__}"
            )

    def selector(self) -> Selector:
        return TradTopK(self.kept)
