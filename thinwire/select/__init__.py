"""Selections: which entries of a gradient are worth sending."""

from thinwire.select.base import (
    ABOVE_THRESHOLDS,
    LARGEST_OF_ROWS,
    Picks,
    Selector,
    Session,
    Turn,
)
from thinwire.select.chunks import ChunkChoice
from thinwire.select.gaussian import GaussianThreshold
from thinwire.select.interleave import Interleaved
from thinwire.select.own import OwnSelection, selector
from thinwire.select.random import RandomChoice
from thinwire.select.redsync import RedSyncThreshold
from thinwire.select.sampled import SampledThreshold
from thinwire.select.scaled import Divisor
from thinwire.select.sidco import SIDCoThreshold
from thinwire.select.threshold_fixed import FixedThreshold
from thinwire.select.threshold_reused import Monitor, ThresholdTopK, Updater
from thinwire.select.topk import AllDimensionTopK, ChunkwiseTopK, ExactTopK, TradTopK

__all__ = [
    "ABOVE_THRESHOLDS",
    "LARGEST_OF_ROWS",
    "AllDimensionTopK",
    "ChunkChoice",
    "ChunkwiseTopK",
    "Divisor",
    "ExactTopK",
    "FixedThreshold",
    "GaussianThreshold",
    "Interleaved",
    "Monitor",
    "OwnSelection",
    "Picks",
    "RandomChoice",
    "RedSyncThreshold",
    "SIDCoThreshold",
    "SampledThreshold",
    "Selector",
    "Session",
    "ThresholdTopK",
    "TradTopK",
    "Turn",
    "Updater",
    "selector",
]
