"""GTopK = TradTopK + Residual + TreeMerge.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks" (ICDCS'19).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import UsageError
from thinwire.exchange.base import Exchange
from thinwire.exchange.tree import TreeMerge
from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK
from thinwire.validate import check_bool

PUBLISHED = TreeMerge(conserve=False)
"""The exchange of a `GTopK` that was given none: it follows `conserve`."""


@dataclass(frozen=True, kw_only=True)
class GTopK(Sparsifier):
    """Merges of two ranks' lists that keep k entries: 2k log P words per rank where P is a power of two.

    Lossy by design as published: a contribution that a merge drops is gone if its place wins elsewhere.
    `conserve=True` keeps it in the memory of the first rank that makes this merge.
    """

    conserve: bool = False
    """Whether nothing is lost. An exchange that conserves says it too."""
    values: str = "fp32"
    exchange: Exchange = PUBLISHED

    def __post_init__(self) -> None:
        check_bool("conserve", self.conserve)
        if self.exchange is PUBLISHED and self.conserve:
            object.__setattr__(self, "exchange", TreeMerge(conserve=True))
        super().__post_init__()
        conserves = getattr(self.exchange, "conserve", True)
        if self.conserve and not conserves:
            raise UsageError(
                f"conserve is True and exchange is {self.exchange!r}, which does not conserve; say it in one place"
            )
        object.__setattr__(self, "conserve", conserves)

    def selector(self) -> Selector:
        return TradTopK(self.kept)
