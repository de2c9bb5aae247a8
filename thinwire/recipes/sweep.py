"""Sweep: every combination of some settings as a job of its own, one table and one page over all of them.

runs/SWEEP/sweep.json                  what is swept
runs/SWEEP/config.toml                 the settings that all jobs share
runs/SWEEP/training.lr=0.1/            the run folder of one combination
runs/SWEEP/report.html                 all of them, compared
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from thinwire.errors import JobError, UsageError
from thinwire.recipes.job import TRAIN_METHOD, Job, build_job
from thinwire.recipes.launch import launch
from thinwire.recipes.report import (
    SETTINGS_FILE,
    check_replicas,
    find_finished,
    run_folder,
    write_results,
)
from thinwire.recipes.settings import parse_override
from thinwire.report.build import REPORT_FILE, build_report
from thinwire.report.runs import SWEEP_FILE
from thinwire.tools.comparison import percent
from thinwire.tools.files import write_text
from thinwire.tools.progress import make_progress
from thinwire.tools.results import Row, group_seeds
from thinwire.tools.scores import format_spread, name_metric
from thinwire.tools.settings.sections import Settings, compose, to_toml
from thinwire.tools.tables import TIGHT, say

Command = Literal["train", "compare"]
LONGEST_NAME = 120


@dataclass(frozen=True)
class Combination:
    """One value for each swept setting, both as they were typed."""

    pairs: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """'training.lr=0.1,training.momentum=0.9', as a folder can be called."""
        full = ",".join(f"{name}={value}" for name, value in self.pairs)
        safe = re.sub(r"[^\w.,=+-]", "_", full)
        if safe == full and len(full) <= LONGEST_NAME:
            return full
        return f"{safe[:LONGEST_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"

    def apply(self, settings: Settings) -> Settings:
        typed = (f"{name}={value}" for name, value in self.pairs)
        return compose([settings, *(parse_override(text, option="sweep") for text in typed)])


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """'training.lr=0.1,0.2' as the values of a setting; each setting and each value once."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        values = split_values(listed)
        for value in values or [""]:
            parse_override(f"{name}={value}", option="sweep")
        if not values:
            raise UsageError(f"sweep is {text!r}; name the values, such as training.lr=0.1,0.2")
        if name.strip() in found:
            raise UsageError(f"sweep names {name.strip()} twice; give all its values at once")
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise UsageError(f"sweep is {text!r}, which has {twice} twice; name each value once")
        found[name.strip()] = values
    return found


def split_values(text: str) -> list[str]:
    """At the commas, but for those inside brackets: a value may be a list."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def combine(swept: Mapping[str, Sequence[str]]) -> list[Combination]:
    """Every combination; the last setting changes fastest."""
    return [
        Combination(tuple(zip(swept, values, strict=True)))
        for values in itertools.product(*swept.values())
    ]


def with_seeds(command: str, settings: Settings, seeds: Sequence[int]) -> Settings:
    """The settings of a comparison over these seeds; of `train` with its one method."""
    compared: dict[str, Any] = {"seeds": list(seeds)}
    if command == "train":
        compared["methods"] = [settings.get("method", {}).get("name") or TRAIN_METHOD]
    return compose([settings, {"compare": compared}])


def plan_jobs(
    command: Command,
    settings: Settings,
    swept: Mapping[str, Sequence[str]],
    out: Path,
) -> dict[Combination, Job]:
    """A job per combination, each in a folder of its own; UsageError where one of them is impossible."""
    return {
        one: build_job(
            command, one.apply(settings), out=out / one.name, resume=(out / one.name).exists()
        )
        for one in combine(swept)
    }


# -- running it ------------------------------------------------------------------------------------------------


def run_sweep(
    jobs: Mapping[Combination, Job],
    settings: Settings,
    swept: Mapping[str, Sequence[str]],
    out: Path,
    *,
    resume: bool,
    console: Console,
) -> None:
    """Run every combination that is not finished yet; then the table and the page. A job that fails does not end the others."""
    command = next(iter(jobs.values())).command
    open_folder(out, command, settings, swept, resume=resume)
    finished = {one: find_finished(job) for one, job in jobs.items()}
    results: list[tuple[Combination, list[Row]]] = []
    failures: dict[str, str] = {}
    for number, (one, job) in enumerate(jobs.items(), start=1):
        say(console, f"{one.name}: job {number} of {len(jobs)}")
        try:
            results.append((one, run_job(job, finished[one], console)))
        except JobError as error:
            failures[one.name] = str(error)
            say(console, f"{one.name}: {error}")
    if results:
        console.print(sweep_table(results))
        folders = [out / one.name for one, _ in results]
        write_text(out / REPORT_FILE, build_report(folders))
        say(console, f"files in {out}; {out / REPORT_FILE} shows them")
    if failures:
        raise JobError(f"{len(failures)} of {len(jobs)} jobs failed: {', '.join(failures)}")


def open_folder(
    out: Path,
    command: str,
    settings: Settings,
    swept: Mapping[str, Sequence[str]],
    *,
    resume: bool,
) -> None:
    """Only a sweep that is resumed may find the folder full."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not resume:
        raise UsageError(
            f"out is '{out}', which is there already; name a new or empty folder, or --resume what is in it"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / SETTINGS_FILE, to_toml(settings))
    content = {
        "command": command,
        "sweep": {name: list(values) for name, values in swept.items()},
        "jobs": [one.name for one in combine(swept)],
    }
    write_text(out / SWEEP_FILE, json.dumps(content, indent=1) + "\n")


def read_sweep(out: Path) -> tuple[Command, dict[str, list[str]]] | None:
    """Of what command a folder's sweep was, and over what; None where there is none."""
    file = out / SWEEP_FILE
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
        swept = {name: list(values) for name, values in content["sweep"].items()}
        return content["command"], swept
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UsageError(f"{file} is damaged; remove it and name the sweep again") from None


def run_job(job: Job, finished: Mapping[str, Any], console: Console) -> list[Row]:
    """The rows of a combination; what is finished is not done again, and no process is started for it."""
    known = all(cell.label in finished for cell in job.cells())
    if known:
        say(console, "  finished already")
        rows = [Row(**finished[cell.label]) for cell in job.cells()]
    else:
        with run_folder(job), make_progress(console) as progress:
            rows = launch(job, progress.show)
    if not known or not (job.out / REPORT_FILE).exists():
        write_results(job, rows)
    check_replicas(rows)
    return rows


# -- the table -------------------------------------------------------------------------------------------------


def sweep_table(results: Sequence[tuple[Combination, Sequence[Row]]]) -> Table:
    """One line per combination, method and density, over its seeds: mean and standard deviation. The best score is marked."""
    lines = [(one, group) for one, rows in results for group in group_seeds(rows)]
    first = lines[0][1][0]
    swept = [name for name, _ in results[0][0].pairs]
    shown = [name.rpartition(".")[2] for name in swept]
    short = shown if len(set(shown)) == len(shown) else swept
    score = f"test\n{name_metric(first.metric)}"
    headings = [
        *short,
        "method",
        "density\nasked",
        score,
        "seeds",
        "MB/step\nsent",
        "ratio",
        "ms/step",
    ]
    table = Table(*headings, padding=(0, 1, 0, 0), **TIGHT)
    for column in table.columns[len(swept) + 1 :]:
        column.justify = "right"
    best = max(lines, key=lambda line: judge(line[1]))
    for one, group in lines:
        asked = group[0].asked_density
        ms = [row.ms_per_step for row in group if row.ms_per_step is not None]
        mark = " *" if group is best[1] and len(lines) > 1 else ""
        table.add_row(
            *(value for _, value in one.pairs),
            group[0].method,
            "-" if asked is None else percent(asked),
            format_spread(first.metric, [row.score for row in group]) + mark,
            str(len(group)),
            f"{statistics.fmean(row.wire_bytes_per_step for row in group) / 1e6:.4f}",
            f"{statistics.fmean(row.ratio for row in group):.1f}x",
            f"{statistics.median(ms):.1f}" if ms else "-",
        )
    return table


def judge(group: Sequence[Row]) -> float:
    """Higher is better, whatever the metric; a score that was lost is the worst."""
    mean = statistics.fmean(row.score for row in group)
    value = mean if group[0].higher_is_better else -mean
    return value if value == value else float("-inf")
