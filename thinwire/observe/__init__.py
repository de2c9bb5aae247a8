"""Observe: what was sent, by phase and by parameter, and how long the stations of a step take."""

from thinwire.observe.clock import Mark, wait_for
from thinwire.observe.dimensions import DimensionStats
from thinwire.observe.ledger import Ledger, Traffic
from thinwire.observe.stations import DECODE, ENCODE, EXCHANGE, HOOK, STATIONS, watch
from thinwire.observe.stats import ParameterStats, Stats
from thinwire.observe.writers import write_values

__all__ = [
    "DECODE",
    "ENCODE",
    "EXCHANGE",
    "HOOK",
    "STATIONS",
    "DimensionStats",
    "Ledger",
    "Mark",
    "ParameterStats",
    "Stats",
    "Traffic",
    "wait_for",
    "watch",
    "write_values",
]
