"""What the step benchmark says at its end, and before it begins."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from thinwire.bench.step_report import show_rows
from thinwire.cli import main
from thinwire.report.step_rows import (
    current_rows,
    find_baseline,
    judge,
    name_link,
    title_gain,
    warn,
)


def row(method: str, ms: float | None, rate: str = "100mbit", **changes) -> dict:
    shared = {"model": "small", "workers": 2, "device": "cpu", "amp": "none", "batch": 32}
    shared |= {"length": None, "bucket_mb": None, "density": None, "rank": None, "status": "ok"}
    shared |= {"no_sync_ms": 10.0, "parallel": "ddp"}
    return {**shared, "method": method, "ms": ms, "rate": rate, **changes}


def test_the_verdict_names_the_fastest_method_of_every_link() -> None:
    rows = [
        row("ddp", 110.0),
        row("noop", 1.0),
        row("topk", 25.0, density=0.01),
        row("adtopk", 50.0, density=0.01),
        row("ddp", 10.0, "local"),
        row("topk", 10.0, "local"),
        row("ddp", 10.0, "1gbit", status="failed"),
        row("topk", 10.0, "1gbit"),
    ]
    assert judge(rows) == [
        "topk 0.01 is 4.4x faster than DDP at 100 Mbit/s (small, 2 workers): 25.0 ms a step against 110.0.",
        "Do not compress on local processes (small, 2 workers): nothing is faster than DDP; the best, topk, takes 10.0 ms "
        "a step against 10.0.",
    ]
    assert judge(rows[2:4])[0].startswith("Plain DDP was not measured")
    assert judge(rows[:2]) == [
        "Only DDP was measured at 100 Mbit/s (small, 2 workers), 110.0 ms a step."
    ]


def test_the_table_has_five_columns_in_80_and_says_why_a_row_failed() -> None:
    rows = [
        row("ddp", 110.0, link_bytes=4e6),
        row("adtopk-interleave", 25.0, density=0.01, link_bytes=12_345.0),
        row("noop", 9.0, "any"),
        row("ddp-powersgd", None, rank=4, status="failed", note="it hangs on gloo"),
    ]
    text = io.StringIO()
    show_rows(rows, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    table = lines[:6]
    assert table[0] == "small, 2 workers, batch 32: 10.0 ms without communication"
    assert table[1].split("  ")[0] == "method" and table[1].split()[1:] == [
        *("link", "ms", "against", "DDP", "MB")
    ]
    assert table[3].split() == [
        *("adtopk-interleave", "0.01", "100", "Mbit/s", "25.0", "4.40x", "0.012")
    ]
    assert max(map(len, table)) <= 80
    assert "ddp-powersgd r4, 100 Mbit/s: failed: it hangs on gloo" in lines
    assert lines[-1].startswith("adtopk-interleave 0.01 is 4.4x faster than DDP")


def test_what_rows_are_held_against_is_named() -> None:
    rows = [{"parallel": "ddp"}, {"parallel": "hsdp"}]
    assert [title_gain([row]) for row in rows] == ["against DDP", "against HSDP"]
    assert title_gain(rows) == "against plain"


def test_a_baseline_that_varies_is_warned_about() -> None:
    rows = [row("ddp", 110.0, no_sync_ms=10.0), row("topk", 25.0, no_sync_ms=11.4)]
    assert warn(rows) == []
    assert find_baseline(rows).ms == 10.7
    rows.append(row("adtopk", 25.0, no_sync_ms=12.0))
    (sentence,) = warn(rows)
    assert (
        "without communication a step took 10.0 to 12.0 ms (small, 2 workers), 18% apart"
        in sentence
    )
    # Of another model the step may take longer.
    rows[-1]["model"] = "large"
    assert warn(rows) == []


def test_rows_of_a_model_that_was_changed_are_not_shown() -> None:
    old = row("ddp", 1.0, shapes="a", date="2026-01-01")
    new = row("ddp", 2.0, shapes="b", date="2026-01-02")
    other = row("ddp", 3.0, model="other", shapes="c", date="2025-01-01")
    unknown = row("topk", 3.0, shapes=None, date="2025-01-01")
    assert current_rows([new, old, other, unknown]) == [new, other, unknown]
    own = [{**one, "model": "my:model"} for one in (new, old, unknown)]
    assert current_rows(own) == own[:1]


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("2.5gbit", "at 2.5 Gbit/s"),
        ("local", "on local processes"),
        ("unshaped", "on an unshaped link"),
    ],
)
def test_links_are_named_for_people(rate: str, said: str) -> None:
    assert name_link(rate) == said


def test_a_model_that_is_wrong_costs_one_sentence_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "own_model.py").write_text("def make(device, batch): return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert main(["bench", "step", "--model", "own_model:make", "--out", "rows"]) == 2
    captured = capsys.readouterr()
    assert "model is 'own_model:make', but it returned a int; it must return" in captured.err
    assert captured.out == "" and not (tmp_path / "rows" / "rows.json").exists()


def test_local_steps_are_named_apart() -> None:
    rows = [row("ddp", 110.0), row("topk", 25.0), row("diloco", 11.0, every=32)]
    first, second = judge(rows)
    assert first.startswith("topk is 4.4x faster than DDP")
    assert second == (
        "Local steps change the optimisation: diloco H=32 takes 11.0 ms a step against 110.0 ms with DDP, 10.0x, at "
        "100 Mbit/s (small, 2 workers)."
    )
