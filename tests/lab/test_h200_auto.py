"""The sitting of `benchmarks/h200_auto.py`: the same processes measure at two rates, and what is there is not measured again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SETTINGS = ("--device", "cpu", "--models", "small", "--workers", "2", "--rates", "500mbit,2gbit")
BETWEEN_GBIT = 0.52
"""What the slower link cannot carry."""
DENSE_MS = 60
"""4.2 MB over the slower link take 67."""


@pytest.mark.root
@pytest.mark.parametrize("more", [[], pytest.param(["--partial"], marks=pytest.mark.slow)])
def test_one_set_of_processes_measures_at_every_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    out = tmp_path / "new" / "folder"
    arguments = [str(BENCHMARKS / "h200_auto.py"), "--out", str(out), *SETTINGS]
    command = [sys.executable, *arguments, "--steps", "6", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    rows: list[dict[str, Any]] = json.loads((out / "rows.json").read_text())
    measured = ["auto", "partial"] if more else ["auto"]
    asked = [(rate, what) for rate in ("2gbit", "500mbit") for what in measured]
    assert [(row["rate"], row["what"]) for row in rows] == asked, done.stdout
    assert done.stdout.count("regret") == 2
    for row in rows:
        assert (row["link_gbit"] > BETWEEN_GBIT) == (row["rate"] == "2gbit")
        dense_ms = row["none_ms"] if row["what"] == "partial" else row["tried_ms"]["dense"]
        assert dense_ms > DENSE_MS or row["rate"] == "2gbit"
        if row["what"] == "auto":
            timed, skipped = row["fixed_ms"].keys(), row["skipped_ms"].keys()
            assert timed | skipped == {"dense", "bf16", "int8", "int4"} and not timed & skipped
            assert row["best_ms"] == min(row["fixed_ms"].values())

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [*arguments, "--partial"])
    import h200_auto
    import tables

    sitting = h200_auto.Sitting(h200_auto.parse())
    missing = [task["what"] for task in sitting.tasks("small")]
    assert missing == ([] if more else ["partial", "partial"])
    assert sitting.dense_ms(rows[0]).keys() == {"2gbit", "500mbit"}
    monkeypatch.setattr(tables, "AUTO_ROWS", out / "rows.json")
    links = ["2 Gbit/s", "500 Mbit/s"]
    for table in (tables.auto_table(), tables.partial_table())[: len(measured)]:
        lines = table.splitlines()[2 : 2 + len(links)]
        assert [line.split(" | ")[1] for line in lines] == links
