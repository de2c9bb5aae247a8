"""Parts of a step: what a row of the step benchmark says about where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.tools.palette import WORK

PARTS = {
    "compute": WORK["compute"],
    "encode": WORK["encode"],
    "decode": WORK["decode"],
    "exposed communication": WORK["travels"],
}
"""In the order in which they are drawn, each with its colour."""


def split_step(row: Mapping[str, Any], alone_ms: float) -> dict[str, float]:
    """A row's step cut into the parts of the bar; they add up to its `ms`. `alone_ms` is the step without communication."""
    compute = min(row["ms"], alone_ms)
    excess = row["ms"] - compute
    encode = min(excess, row["encode_ms"] or 0.0)
    decode = min(excess - encode, row["decode_ms"] or 0.0)
    return {
        "compute": compute,
        "encode": encode,
        "decode": decode,
        "exposed communication": excess - encode - decode,
    }
