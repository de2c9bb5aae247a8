"""The selections that are compared, by name. Needs no tables on a terminal, so that tests on a GPU's host can use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.select import Selector
from thinwire.tools.settings.building import find_public

PUBLISHED = {"finish": "published"}


def selection(name: str, **settings: Any) -> Callable[[float], Selector]:
    """A selection by its public name, at any density."""
    return lambda density: find_public(name)(density=density, **settings)


SELECTIONS: dict[str, Callable[[float], Selector]] = {
    "exact top-k": selection("TradTopK"),
    "DGC sampled": selection("SampledThreshold"),
    "GaussianK": selection("GaussianThreshold"),
    "RedSync": selection("RedSyncThreshold"),
    "RedSync trimmed": selection("RedSyncThreshold", trimmed=True),
    "SIDCo exponential, 1 stage": selection("SIDCoThreshold", distribution="exponential", stages=1),
    "SIDCo gamma, 2 stages": selection("SIDCoThreshold", distribution="gamma", stages=2),
    "SIDCo pareto, 2 stages": selection("SIDCoThreshold", distribution="pareto", stages=2),
    "RandomK": selection("RandomChoice"),
    "ChunkTopK": selection("ChunkChoice"),
    "DGC sampled, published": selection("SampledThreshold", **PUBLISHED),
    "GaussianK, published": selection("GaussianThreshold", **PUBLISHED),
    "RedSync, published": selection("RedSyncThreshold", **PUBLISHED),
    "RedSync trimmed, published": selection("RedSyncThreshold", trimmed=True, **PUBLISHED),
    "SIDCo exponential, 1 stage, published": selection(
        "SIDCoThreshold", distribution="exponential", stages=1, **PUBLISHED
    ),
    "SIDCo gamma, 2 stages, published": selection(
        "SIDCoThreshold", distribution="gamma", stages=2, **PUBLISHED
    ),
    "SIDCo pareto, 2 stages, published": selection(
        "SIDCoThreshold", distribution="pareto", stages=2, **PUBLISHED
    ),
}
"""Published ones send what their estimate gives, cut at 4 k so that the payload has an end."""
