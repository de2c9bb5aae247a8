"""GTopK = TradTopK + Residual + TreeMerge.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks" (ICDCS'19).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.exchange.base import Exchange
from thinwire.exchange.tree import TreeMerge
from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK
from thinwire.validate import check_bool


@dataclass(frozen=True, kw_only=True)
class GTopK(Sparsifier):
    """A tree of merges that keeps k entries: 4k log P words along the longest path.

    Lossy by design as published: a contribution that an inner merge drops is gone if its place wins elsewhere.
    `conserve=True` keeps it in the memory of the rank that dropped it.
    """

    conserve: bool = False
    values: str = "fp32"
    exchange: Exchange = field(default_factory=TreeMerge)

    def __post_init__(self) -> None:
        check_bool("conserve", self.conserve)
        if isinstance(self.exchange, TreeMerge):
            object.__setattr__(self, "exchange", TreeMerge(conserve=self.conserve))
        super().__post_init__()

    def selector(self) -> Selector:
        return TradTopK(self.kept)
