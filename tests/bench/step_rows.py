"""Made-up measurements for tests of what reads rows."""

from __future__ import annotations

from typing import Any

from thinwire.bench.rows import Row, make_row
from thinwire.bench.step_cell import StepCell

ORIGIN = {
    "date": "2026-01-01T00:00:00+00:00",
    "commit": "0" * 40,
    "versions": {"thinwire": "0", "torch": "2"},
    "hardware": {"cpu": "a cpu", "cores": 2, "gpus": [], "system": "Linux"},
}


def fake_result(ms: float, **changes: Any) -> dict[str, Any]:
    return {
        "origin": ORIGIN,
        "settings": "Method()",
        "parameters": 100,
        "steps": 4,
        "times": [ms - 1, ms, ms, ms + 1],
        "alone": [10.0, 10.0],
        "peak_memory_bytes": 10**9,
        "replicas_identical": True,
        "link_bytes": 1000.0,
        "ledger_bytes": 990.0,
        "encode_ms": 2.0,
        "exchange_ms": 5.0,
        "decode_ms": 1.0,
        **changes,
    }


def fake_row(cell: StepCell, ms: float) -> Row:
    return make_row(cell, "lab", fake_result(ms), seconds=1.0)
