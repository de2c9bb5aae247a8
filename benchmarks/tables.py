"""Writes the measured tables into README.md and docs/, from the committed rows.

    python benchmarks/tables.py            # rewrite
    python benchmarks/tables.py --check    # exit 1 if a table is not what its rows say

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from learning.adam_report import make_table as make_adam_table
from learning.report import committed_table

from thinwire.bench.rows import OK, Row, read_rows
from thinwire.report.step_rows import name_rate, name_row

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/methods.md",
    "docs/adtopk.md",
    "docs/training.md",
    "docs/learning.md",
    "docs/lowrank.md",
    "docs/local-steps.md",
    "docs/predictions.md",
    "docs/which-method.md",
)
ADTOPK = ("dense", "topk", "adtopk", "adtopk-interleave", "adtopk-threshold")
LEARNING = (
    ("learning", "cifar10-resnet20"),
    ("learning", "wikitext2-lstm"),
    ("learning", "wikitext2-small-gpt"),
    ("learning-30", "cifar10-resnet20"),
    ("learning-30-cold", "cifar10-resnet20"),
)
"""(folder of the rows, task)"""
MARK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)


SHORT = ("noop", "adtopk 0.01", "adtopk 0.001", "ddp-powersgd r4", "ddp-bf16", "ddp")


def step_table(methods: Sequence[str] | None = None) -> str:
    """Milliseconds per step and the ratio to a step without communication: some methods or all down, models across."""
    rows = [row for row in read_rows(ROOT / "benchmarks/results/h200_step") if row["status"] == OK]
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = dict.fromkeys((row["rate"], name_row(row)) for row in rows)
    table = [
        f"| link | method | {' | '.join(models)} |",
        f"|---|---|{'---|' * len(models)}",
    ]
    for rate, method in lines:
        if methods is not None and method not in methods:
            continue
        cells = [_cell(rows, rate, method, model) for model in models]
        table.append(f"| {rate} | {method} | {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def _cell(rows: list[Row], rate: str, method: str, model: str) -> str:
    for row in rows:
        if (row["rate"], name_row(row), row["model"]) == (rate, method, model):
            return _measured(row)
    return "not measured"


def _measured(row: Row) -> str:
    sent = f", {row['link_bytes'] / 1e6:.0f} MB" if row["link_bytes"] > 1e5 else ""
    return f"{row['ms']:.0f} ms ({row['ratio_no_sync']:.2f}x{sent})"


IN_SCALE = {
    "adam_methods:BIT1": "AdamScale, 1 bit",
    "adam_methods:BIT1_SUMS4": "AdamScale, 1 bit, sums in 4",
    "adam_methods:BIT1_REFRESHED": "AdamScale, 1 bit, a refresh in every step",
    "adam_methods:TOPK1": "AdamScale, top-k 1 %",
}
"""The methods of `adam_methods.py`, measured with AdamW."""


def every_method_table() -> str:
    """All methods, models across: milliseconds, the ratio to no communication, megabytes. The latest sitting counts."""
    sittings = ("h200_step_3", "h200_step_4")
    found = (read_rows(ROOT / "benchmarks/results" / name) for name in sittings)
    rows = [row for row in chain.from_iterable(found) if row["status"] == OK]
    models = list(dict.fromkeys(row["model"] for row in rows))
    first = {name_row(row): row["ms"] for row in rows if row["model"] == models[0]}
    names = sorted(dict.fromkeys(map(name_row, rows)), key=lambda name: first.get(name, 1e9))
    table = [f"| method | {' | '.join(models)} |", f"|---|{'---|' * len(models)}"]
    for name in names:
        cells = []
        for model in models:
            found = [row for row in rows if (name_row(row), row["model"]) == (name, model)]
            cells.append(_measured(found[-1]) if found else "")
        table.append(f"| {IN_SCALE.get(name, name)} | {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def local_table() -> str:
    """Samples per second of all workers and milliseconds per step: methods down, links across."""
    rows = [
        row for row in read_rows(ROOT / "benchmarks/results/local_steps") if row["status"] == OK
    ]
    links = list(dict.fromkeys((row["rate"], row["latency"]) for row in rows))
    named = [name_rate(rate) + (f", {latency}" if latency else "") for rate, latency in links]
    table = [f"| method | {' | '.join(named)} |", f"|---|{'---|' * len(links)}"]
    for method in dict.fromkeys(map(name_row, rows)):
        found = {(row["rate"], row["latency"]): row for row in rows if name_row(row) == method}
        cells = [
            f"{found[link]['samples_per_s']:,.0f} ({found[link]['ms']:.0f} ms)" for link in links
        ]
        table.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def overlap_table() -> str:
    """How much of the exchange of local steps is under inner steps, per rank."""
    table = [
        "| method | rank | exchanges | ms in all | of it under forward and backward | the longest, ms | whole passes under one |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in json.loads((ROOT / "benchmarks/results/local_overlap.json").read_text()):
        method = row["trace"].removeprefix("small-").partition("-100mbit")[0]
        table.append(
            f"| {method} | {row['trace'][-1]} | {row['exchanges']} in {row['steps']} steps | {row['exchange_ms']:.0f} "
            f"| {row['hidden_ms'] / row['exchange_ms']:.0%} | {row['longest_ms']:.0f} | {row['passes']} |"
        )
    return "\n".join(table) + "\n"


def digits_table(methods: Sequence[str] | None = None) -> str:
    """What `thinwire compare digits` found, for some methods or all. Times are left out: the machine was busy."""
    summary = json.loads((ROOT / "benchmarks/results/digits/summary.json").read_text())
    table = [
        "| method | density asked | density sent | test accuracy | MB per step dense | MB per step sent | ratio | replicas identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in summary["rows"]:
        if methods is None or row["method"] in methods:
            asked = "" if row["asked_density"] is None else f"{row['asked_density']:.0%}"
            table.append(
                f"| {row['method']} | {asked} | {row['density']:.2%} | {row['score']:.1%} "
                f"| {row['dense_bytes_per_step'] / 1e6:.3f} | {row['wire_bytes_per_step'] / 1e6:.4f} "
                f"| {row['ratio']:.0f}x | {'yes' if row['replicas_identical'] else 'NO'} |"
            )
    return "\n".join(table) + "\n"


def compress_table() -> str:
    """Encode and decode of a whole gradient as a multiple of one pass over memory: methods down, models across."""
    rows = json.loads((ROOT / "benchmarks/results/compress/rows.json").read_text())
    rows = [row for row in rows if row["status"] == OK and row["tensor"] is None]
    floors = {row["model"]: row for row in rows if row["kind"] == "floor"}
    table = [
        f"| work | {' | '.join(floors)} |",
        f"|---|{'---|' * len(floors)}",
        f"| floor, ms | {' | '.join(format(row['ms'], '.2f') for row in floors.values())} |",
    ]
    lines = dict.fromkeys(_work(row) for row in rows if row["kind"] != "floor")
    for line in lines:
        found = {row["model"]: row for row in rows if _work(row) == line}
        cells = [_times(found[model], floors[model]) if model in found else "" for model in floors]
        table.append(f"| {line} | {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def _times(row: Row, floor: Row) -> str:
    """With the host; of the device alone, where that was measured."""
    text = f"{row['ms']:.1f} ms ({row['ratio']:.1f}x)"
    if row.get("device_ms") is None or row["kind"] != "thinwire":
        return text
    return f"{text}; {row['device_ms']:.2f} ms ({row['device_ms'] / floor['device_ms']:.2f}x)"


def _work(row: Row) -> str:
    buckets = {None: "25 MB buckets"}.get(row["bucket_mb"], "one bucket")
    if row["kind"] == "floor":
        return "floor"
    where = f", {buckets}" if row["kind"] == "thinwire" else ""
    return f"{row['name']}, {row['work'].replace('_', ' ')}{where}"


def lowrank_table() -> str:
    """Encode, decode and settle of all matrices of a model, against the arithmetic of torch's hook."""
    rows = json.loads((ROOT / "benchmarks/results/lowrank/rows.json").read_text())
    shown = {"torch hook": "torch's hook", "powersgd": "PowerSGD", "acpsgd": "ACP-SGD"}
    table = [
        "| model | rank | | wall | host | kernels | launches | of torch's hook |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["parameters"] == "matrices" and row["name"] in shown:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            table.append(
                f"| {row['model']} | {row['rank']} | {shown[row['name']]} | {row['ms']:.1f} ms "
                f"| {row['host_ms']:.1f} ms | {row['kernel_ms']:.1f} ms | {row['launches']} | {ratio} |"
            )
    return "\n".join(table) + "\n"


def adam_table(study: str) -> str:
    """Loss with AdamW and bits, a method a line."""
    rows = ROOT / "benchmarks" / "results" / study / "rows.json"
    return make_adam_table(json.loads(rows.read_text()))


AUTO_ROWS = ROOT / "benchmarks/results/auto/rows.json"
NO_ROWS = "There are no such rows yet.\n"


def auto_rows(what: str) -> list[Row]:
    """Of `h200_auto.py`; none before its first sitting."""
    rows = json.loads(AUTO_ROWS.read_text()) if AUTO_ROWS.exists() else []
    return [row for row in rows if row["what"] == what]


def auto_table() -> str:
    """What Auto chose by model and link, against the best fixed method in the same processes."""
    rows = auto_rows("auto")
    if not rows:
        return NO_ROWS
    table = [
        "| model | link | really, Gbit/s | no communication | Auto chose | predicted | measured | best fixed method | regret | settled after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted = row["predicted_ms"].get(row["chosen"])
        table.append(
            f"| {row['model']} | {name_rate(row['rate'])} | {row['link_gbit']:.2g} | {row['no_sync_ms']:.0f} ms "
            f"| {row['chosen']} | {'' if predicted is None else f'{predicted:.0f} ms'} | {row['auto_ms']:.0f} ms "
            f"| {row['best']}, {row['best_ms']:.0f} ms | {row['regret']:.1%} "
            f"| {row['settling_steps']} steps, {row['settling_s']:.0f} s |"
        )
    misses = [
        abs(row["predicted_ms"][row["chosen"]] / row["auto_ms"] - 1)
        for row in rows
        if row["chosen"] in row["predicted_ms"]
    ]
    table.append(
        f"\nThe largest regret is {max(row['regret'] for row in rows):.1%}. A step with what was chosen took {statistics.median(misses):.1%} longer "
        f"or shorter than predicted in median, {max(misses):.1%} at most."
    )
    return "\n".join(table) + "\n"


def partial_table() -> str:
    """Milliseconds per step with nothing, everything and a part of a model sparsified."""
    rows = auto_rows("partial")
    if not rows:
        return NO_ROWS
    table = [
        "| model | link | really, Gbit/s | no communication | none | all | partial | dense in it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["model"], name_rate(row["rate"]), f"{row['link_gbit']:.2g}"]
        if "skipped" in row:
            cells += ["", row["skipped"], "", "", ""]
        else:
            cells += [
                f"{row[name]:.1f}" for name in ("no_sync_ms", "none_ms", "all_ms", "partial_ms")
            ]
            share = f"{row['elements_dense']:.0%} of the elements"
            cells += [f"{row['tensors_dense']} of {row['tensors']} tensors, {share}"]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "adam": functools.partial(adam_table, "adam"),
    "adam-cpu": functools.partial(adam_table, "adam-cpu"),
    "auto": auto_table,
    "partial": partial_table,
    "lowrank": lowrank_table,
    "step": step_table,
    "step-methods": every_method_table,
    "step-short": lambda: step_table(SHORT),
    "local": local_table,
    "overlap": overlap_table,
    "digits": digits_table,
    "digits-adtopk": lambda: digits_table(ADTOPK),
    "compress": compress_table,
    **{f"{name}-{task}": functools.partial(committed_table, name, task) for name, task in LEARNING},
}


def fill(page: str) -> str:
    """The page with every table made anew."""
    return MARK.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], page)


def main() -> int:
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        if fill(text) != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(fill(text))
    print(
        f"tables differ from their rows in {', '.join(stale)}"
        if stale
        else "all tables are up to date"
    )
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
