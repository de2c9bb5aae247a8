"""Pages from real runs: what stands in them, that they load nothing, and that nothing of a run becomes markup."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from thinwire.bench.anchors import ANCHORS
from thinwire.bench.local_methods import LOCAL_METHODS
from thinwire.cli import main
from thinwire.report.build import build_report
from thinwire.report.charts import MOST_POINTS, plain, thin
from thinwire.tools.methods import METHODS
from thinwire.tools.metrics import read_metrics
from thinwire.tools.palette import find_method, find_style


class Reader(HTMLParser):
    """Elements and the text between them, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def read_charts(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_comparison_writes_its_page(compared: Path) -> None:
    page = (compared / "report.html").read_text()
    text = Reader(page).text
    assert "dense ended at accuracy" in text or "No method came close to dense" in text
    for heading in ("Results", "Curves", "Layers: plan and traffic", "Settings", "Provenance"):
        assert heading in text
    assert "training.batch_size" in text and "versions.torch" in text
    assert "Workers were simulated" in text
    assert len(page) < 200_000


def test_curves_hold_what_was_logged(compared: Path) -> None:
    loss, score = read_charts((compared / "report.html").read_text())
    assert [axis["key"] for axis in loss["axes"]] == ["steps", "bytes", "seconds"]
    records = read_metrics(compared / "metrics.jsonl")
    rows = json.loads((compared / "summary.json").read_text())["rows"]
    for curve in (*loss["curves"], *score["curves"]):
        first = next(row for row in rows if row["method"] == curve["name"])
        steps = [r for r in records if r["event"] == "step" and r["run"] == first["run"]]
        ends = {key: values[-1] for key, values in curve["x"].items()}
        assert ends["steps"] == len(steps) == first["steps"]
        assert ends["bytes"] == pytest.approx(sum(r["wire_bytes"] for r in steps) / 1e6, rel=1e-5)
        assert ends["seconds"] == pytest.approx(sum(r["ms"] for r in steps) / 1e3, rel=1e-5)
        # Two seeds: a range around the mean.
        assert all(
            a <= b <= c for a, b, c in zip(curve["low"], curve["y"], curve["high"], strict=True)
        )
    assert score["y"] == "accuracy, %"


def test_a_run_that_diverged_has_a_page(compared: Path, tmp_path: Path) -> None:
    summary = json.loads((compared / "summary.json").read_text())
    for row in summary["rows"]:
        if row["method"] == "topk":
            row |= {"score": float("nan"), "replicas_identical": False, "layers": None}
            row["tests"] = [[step, float("nan")] for step, _ in row["tests"]]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    records = read_metrics(compared / "metrics.jsonl")
    lost = [{**r, "loss": None} if r["run"].startswith("topk") else r for r in records]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lost))
    page = build_report([tmp_path])
    text = Reader(page).text
    assert "No method came close to dense" in text
    assert "The workers ended with different parameters under topk." in text
    for chart in read_charts(page):
        drawn = {curve["name"]: curve["y"] for curve in chart["curves"]}
        assert set(drawn["topk"]) == {None} and None not in drawn["dense"]


def test_layers_hold_plan_and_traffic(compared: Path) -> None:
    rows = json.loads((compared / "summary.json").read_text())["rows"]
    row = next(row for row in rows if row["method"] == "topk")
    assert sum(layer["elements"] for layer in row["layers"]) == row["parameters"]
    sent = sum(layer["wire_bytes"] for layer in row["layers"])
    assert sent == pytest.approx(row["wire_bytes_per_step"], rel=0.01)
    text = Reader((compared / "report.html").read_text()).text
    for layer in row["layers"]:
        assert layer["name"] in text and layer["action"] in text and layer["why"] in text


def test_several_runs_on_one_page(
    compared: Path, trained: Path, timed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "all.html"
    assert main(["report", str(compared), str(trained), str(timed), "--out", str(out)]) == 0
    page = out.read_text()
    assert "The runs differ in:" in page and "method.density" in page
    # Each run is judged, the one without a dense line against the other's.
    judged = [
        one for one in Reader(page).texts if "dense ended at" in one or "close to dense" in one
    ]
    assert len(judged) == 2 and "compared: topk" in judged[0] and "trained: adtopk" in judged[1]
    loss, score, steps = read_charts(page)
    assert [curve["name"] for curve in loss["curves"]] == [
        "compared: dense",
        "compared: topk",
        "trained: adtopk",
    ]
    assert len(score["curves"]) == 3
    # One colour per method, on the whole page and in every picture.
    colours = {curve["name"].split()[-1]: curve["colour"] for curve in loss["curves"]}
    assert colours == {name: find_style(name)[0] for name in ("dense", "topk", "adtopk")}
    assert {curve["name"]: curve["colour"] for curve in steps["curves"]}["topk 0.01"] == colours[
        "topk"
    ]


def test_a_step_benchmark(timed: Path) -> None:
    page = build_report([timed])
    text = Reader(page).text
    assert "topk 0.01 is 40.0x faster than DDP at 100 Mbit/s (small, 4 workers)" in text
    assert "topk 0.01 is 8.0x faster than DDP at 1 Gbit/s (small, 4 workers)" in text
    assert "1 of 5 measurements failed: adtopk 1gbit." in text
    (chart,) = read_charts(page)
    assert [axis["key"] for axis in chart["axes"]] == ["rate", "bytes"]
    curves = {curve["name"]: curve for curve in chart["curves"]}
    assert curves["ddp"]["x"]["rate"] == [0.1, 1.0] and curves["ddp"]["y"] == [4000.0, 400.0]


def test_a_plan(planned: Path) -> None:
    page = (planned / "report.html").read_text()
    reader = Reader(page)
    plan = json.loads((planned / "plan.json").read_text())
    for sentence in plan["sentences"]:
        assert sentence in reader.text
    for row in plan["candidates"]:
        assert row["name"] in reader.text and row["verdict"] in reader.text
    (chart,) = read_charts(page)
    assert {curve["name"] for curve in chart["curves"]} == plan["step_ms"].keys()
    # At no rate is the choice slower than dense.
    curves = {curve["name"]: curve["y"] for curve in chart["curves"]}
    assert all(a <= b for a, b in zip(curves["chosen"], curves["dense"], strict=True))
    # Every bucket of dense and of the choice is on the time line.
    lanes = sum(text.startswith("bucket ") and ":" not in text for text in reader.texts)
    assert lanes == sum(len(one["spans"]) for one in plan["timelines"])


def test_a_trace_becomes_a_timeline(timed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traced"
    shutil.copytree(timed, folder)
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur}
        for name, ts, dur in (
            ("step 0", 0, 900),
            ("thinwire::encode", 10, 5),
            ("step 1", 1000, 2000),
            ("thinwire::encode", 1100, 200),
            ("thinwire::exchange", 1300, 1000),
            ("thinwire::decode", 2300, 100),
        )
    ]
    (folder / "small-topk-rank0.json").write_text(json.dumps({"traceEvents": events}))
    (folder / "broken-rank0.json").write_text("{")
    reader = Reader(build_report([folder]))
    assert "Bucket timeline" in reader.text and "small-topk" in reader.text
    assert "broken" not in reader.text
    assert sum(tag == "rect" for tag, _ in reader.tags) == 3
    assert "0.10 to 0.30 ms, number 1" in reader.text


def test_nothing_is_loaded_from_elsewhere(compared: Path, timed: Path, planned: Path) -> None:
    for page in map(build_report, ([compared], [timed], [planned])):
        reader = Reader(page)
        assert {tag for tag, _ in reader.tags}.isdisjoint(
            {"link", "img", "iframe", "object", "embed"}
        )
        for _, attributes in reader.tags:
            assert attributes.keys().isdisjoint({"src", "href", "srcset", "action", "background"})
        assert "url(" not in page and "@import" not in page
        assert "default-src 'none'" in page
        # The only address is the name of SVG's elements, which nobody fetches.
        assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' &\u2028"


def poison(value: Any) -> Any:
    """The same, with every text of it changed into markup."""
    if isinstance(value, dict):
        kept = ("metric", "status", "rate", "event")
        return {k: v if k in kept else poison(v) for k, v in value.items()}
    if isinstance(value, list):
        return [poison(one) for one in value]
    return f"{value}{EVIL}" if isinstance(value, str) else value


def test_nothing_of_a_run_becomes_markup(
    compared: Path, timed: Path, planned: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "<b onclick='x'>&amp;"
    folder.mkdir()
    for name in ("summary.json", "metrics.jsonl"):
        lines = (compared / name).read_text()
        if name == "summary.json":
            (folder / name).write_text(json.dumps(poison(json.loads(lines))))
        else:
            poisoned = [json.dumps(poison(json.loads(line))) for line in lines.splitlines()]
            (folder / name).write_text("\n".join(poisoned) + "\n")
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "rows.json").write_text(
        json.dumps(poison(json.loads((timed / "rows.json").read_text())))
    )
    plan = tmp_path / "plan"
    plan.mkdir()
    (plan / "plan.json").write_text(
        json.dumps(poison(json.loads((planned / "plan.json").read_text())))
    )
    page = build_report([folder, rows, plan])
    reader = Reader(page)
    honest = Reader(build_report([compared, timed, planned]))
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert {tag for tag, _ in reader.tags} <= {tag for tag, _ in honest.tags}
    assert not any(key.startswith("on") for _, attributes in reader.tags for key in attributes)
    assert EVIL in read_charts(page)[0]["curves"][0]["name"]
    assert "<b onclick='x'>&amp;" in reader.text


@pytest.mark.parametrize("content", [None, "[]", "{}", '[{"model": 1}]', "nonsense"])
def test_other_folders_are_refused_in_a_sentence(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "rows.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
    assert main(["report", str(tmp_path / "nowhere")]) == 2


def test_lost_numbers_and_long_runs() -> None:
    assert plain([1 / 3, float("nan"), float("inf")]) == [0.333333, None, None]
    assert thin(3) == [0, 1, 2]
    kept = thin(100_000)
    assert len(kept) == MOST_POINTS and (kept[0], kept[-1]) == (0, 99_999)


def test_every_method_has_a_line_of_its_own() -> None:
    names = [*METHODS, *ANCHORS, *LOCAL_METHODS]
    assert len({find_style(name) for name in names}) == len(names)
    assert find_style("mine:METHOD") == find_style("mine:METHOD")
    first, second = find_style("topk"), find_style("topk", 1)
    assert first[0] == second[0] and first[1] != second[1]
    labels = ("topk@0.01#2", "topk-5%", "topk-residual-5%", "topk")
    assert {find_method(label) for label in labels} == {"topk"}
    assert [find_method(label) for label in ("int4", "acpsgd-4", "bf16", "quantized-4bit")] == [
        *("quantized-4bit", "acpsgd", "ddp-bf16", "quantized-4bit")
    ]
