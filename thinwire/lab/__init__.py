"""An emulated cluster on one machine: network namespaces joined by shaped links."""

from __future__ import annotations

from thinwire.lab.counters import Counters, HostTraffic, Traffic, read_own_counters
from thinwire.lab.lab import Lab, RunResult, clean, why_no_lab
from thinwire.lab.runner import RankResult, print_line
from thinwire.lab.topology import LabSpec

__all__ = [
    "Counters",
    "HostTraffic",
    "Lab",
    "LabSpec",
    "RankResult",
    "RunResult",
    "Traffic",
    "clean",
    "print_line",
    "read_own_counters",
    "why_no_lab",
]
