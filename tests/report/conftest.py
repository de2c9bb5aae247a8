"""Real runs to report on, made once: two simulated workers, two epochs of digits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.step_rows import ORIGIN, fake_result
from tests.plan.test_decision import describe
from tests.report.browser import Browser
from thinwire.bench.rows import RowBook, make_failed_row, make_row
from thinwire.bench.step_cell import StepCell
from thinwire.cli import main

TINY = "digits --simulate-workers 2 --epochs 2"


@pytest.fixture(scope="package")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `thinwire compare` leaves behind, its page among it."""
    out = tmp_path_factory.mktemp("report") / "compared"
    methods = "--methods dense,topk --density 0.05 --seed 0,1"
    assert main(f"compare {TINY} {methods} --out {out}".split()) == 0
    return out


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "trained"
    assert main(f"train {TINY} --method adtopk --density 0.05 --out {out}".split()) == 0
    return out


@pytest.fixture(scope="package")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows as `thinwire bench step` writes them, one of a measurement that failed."""
    out = tmp_path_factory.mktemp("report") / "timed"
    book = RowBook(out)
    for rate, times in (("1gbit", (400.0, 50.0)), ("100mbit", (4000.0, 100.0))):
        for method, ms in zip(("ddp", "topk"), times, strict=True):
            density = 0.01 if method == "topk" else None
            cell = make_cell(method=method, rate=rate, density=density)
            result = fake_result(ms, link_bytes=1e6 if method == "topk" else 6e7)
            book.add(make_row(cell, "lab", result, seconds=1.0))
    failed = make_cell(method="adtopk", rate="1gbit")
    origin = {**ORIGIN, "date": "2026-01-02T00:00:00+00:00"}
    book.add(make_failed_row(failed, "lab", origin, 1.0, "it <b>hung</b>"))
    return out


@pytest.fixture(scope="package")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `thinwire plan --out` leaves behind, from a saved profile."""
    out = tmp_path_factory.mktemp("report") / "planned"
    profile = out.parent / "profile.json"
    describe().save(profile)
    options = f"--rate 1gbit --workers 16 --optimizer adam --out {out}"
    assert main(["plan", str(profile), *options.split()]) == 0
    return out


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests; they are skipped with a sentence where there is none."""
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def make_cell(**settings: Any) -> StepCell:
    return StepCell(model="small", workers=4, batch=32, length=None, **settings)
