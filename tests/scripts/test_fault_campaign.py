"""The fault campaign counts, goes on where it was stopped, and fails if a count that must be 0 is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and mounts disks")


def campaign(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/fault_campaign.py", "--out", str(out), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_book_goes_on_and_what_must_be_zero_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from faults.parts import Book, Part, failures

    path = tmp_path / "counts.json"
    Book(path).add("disk", {"units": 2, "full": 1, "slowest": 3.0})
    book = Book(path)
    book.add("disk", {"units": 1, "damaged": 1, "slowest": 2.0})
    assert book.done("disk") == 3 and book.done("kills") == 0
    assert book.tallies["disk"] == {"units": 3, "full": 1, "slowest": 3.0, "damaged": 1}
    part = Part(name="disk", harm="", units=3, run=lambda *_: iter(()), zero=("damaged", "lost"))
    assert failures(part, book.tallies["disk"]) == ["damaged"]
    assert failures(part, {"units": 2, "full": 1}) == []


@pytest.mark.slow
def test_counts_are_kept_and_judged(tmp_path: Path) -> None:
    first = campaign(tmp_path, "--only", "disk,infinities", "--scale", "0.02")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "| disk | checkpoints onto a disk that is full or read-only | 2 | full 1" in first.stdout
    assert "| infinities | infinities under a GradScaler | 20 | lost steps 20," in first.stdout

    book = tmp_path / "counts.json"
    counts = json.loads(book.read_text())
    assert counts["disk"]["refused in a sentence"] == 2
    counts["disk"]["damaged"] = 1
    book.write_text(json.dumps(counts))
    second = campaign(tmp_path, "--only", "disk", "--scale", "0.03")
    assert second.returncode == 1
    assert "disk: 2 of 3" not in second.stdout and "disk: 3 of 3" in second.stdout
    assert "disk: 1 damaged, which must be 0" in second.stdout


@pytest.mark.slow
def test_an_unknown_part_is_one_sentence(tmp_path: Path) -> None:
    refused = campaign(tmp_path, "--only", "earthquakes")
    assert refused.returncode == 2 and "--only takes kills,cycles" in refused.stderr
