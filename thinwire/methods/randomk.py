"""RandomK = RandomChoice + Residual + SharedIndices: random places, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.exchange.base import Exchange
from thinwire.exchange.shared_indices import SharedIndices
from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.random import RandomChoice


@dataclass(frozen=True, kw_only=True)
class RandomK(Sparsifier):
    """A random part of each tensor, drawn from name and step; only values travel, in an all-reduce."""

    exchange: Exchange = field(default_factory=SharedIndices)
    """How the values travel."""
    seed: int = 0
    """Another seed draws other places."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector()

    def selector(self) -> Selector:
        return RandomChoice(self.kept, self.seed)
