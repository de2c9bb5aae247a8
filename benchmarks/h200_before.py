"""This version against another one, in turn in the same sitting: step times and what compressing costs.

    git archive --prefix=before/ COMMIT | tar x
    sudo python3 benchmarks/h200_before.py before --before-commit COMMIT --out out
    sudo python3 benchmarks/h200_before.py before --out out --device cpu --models small --methods topk --rate 500mbit --workers 2

Both versions measure with their own code, one right after the other: steps model by model (`h200_step.py`), then what compressing
costs (`thinwire.bench.compress`). `--out` gets a folder for each version, and table.md, where a ratio of 1.02 means that this
version takes 2 % longer. Rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 40
SECONDS = 30.0
"""No method is so slow that it is timed over fewer steps."""
COMPRESS = """
import json, sys
from pathlib import Path
from thinwire.bench.compress import CompressSettings, measure_compress
models, methods, device, seconds, out = json.loads(sys.argv[1])
settings = CompressSettings(tensors=False, seconds=seconds)
measure_compress(models, [0.01], device, methods=methods, anchors=(), settings=settings, out=Path(out))
"""
"""Both versions understand it."""
LAPS_S = 2.0
"""For each row of the compression benchmark."""

Row = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="the other version's source")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--what", default="steps,compress", help="one of the two, or both")
    parser.add_argument("--models", default="bert-large,resnet152")
    parser.add_argument("--methods", default="adtopk,topk,dgc,acpsgd")
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.3)
    parser.add_argument("--commit", help="of this version, where this is no checkout")
    parser.add_argument("--before-commit", help="of the other version")
    return parser.parse_args()


class Sitting:
    """Both versions, and what is left of the time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.monotonic() + 60 * options.minutes
        self.versions = {"before": options.before.resolve(), "now": ROOT}
        self.commits = {"before": options.before_commit, "now": options.commit}

    def measure_steps(self, model: str, version: str) -> None:
        options = self.options
        cells = [f"{method}:{model}:{options.rate}" for method in options.methods.split(",")]
        arguments = ["--cells", ",".join(cells), "--workers", str(options.workers)]
        arguments += ["--rates", options.rate, "--steps", str(STEPS), "--seconds", str(SECONDS)]
        arguments += ["--out", str(options.out.resolve() / version / f"step-{model}")]
        arguments += ["--minutes", f"{(self.end - time.monotonic()) / 60:.2f}"]
        script = self.versions[version] / "benchmarks" / "h200_step.py"
        self.run(version, [str(script), *arguments, "--device", options.device])

    def measure_compression(self, version: str) -> None:
        options = self.options
        models, methods = options.models.split(","), options.methods.split(",")
        out = str(options.out.resolve() / version / "compress")
        told = json.dumps([models, methods, options.device, LAPS_S, out])
        self.run(version, ["-c", COMPRESS, told])

    def run(self, version: str, arguments: list[str]) -> None:
        """Python with the code of that version, and with what lies beside this one for both."""
        source = self.versions[version]
        paths = [str(source), str(ROOT / "carry" / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        print(f"== {version}", flush=True)
        command = [sys.executable, *arguments]
        subprocess.run(command, cwd=source, env=environment, check=False)

    def rows(self, version: str, pattern: str) -> list[Row]:
        """Those that are in order, each with the commit it was measured at."""
        found: list[Row] = []
        for file in sorted((self.options.out / version).glob(pattern)):
            found += json.loads(file.read_text())
        for row in found:
            row["commit"] = self.commits[version] or row["commit"]
        return [row for row in found if row["status"] == "ok"]


def make_table(sitting: Sitting) -> str:
    lines = ["| model | method | what | before | now | ratio |", "|---|---|---|---|---|---|"]
    old = {step_key(row): row for row in sitting.rows("before", "step-*/rows.json")}
    for row in sitting.rows("now", "step-*/rows.json"):
        lines += compare(row, old.get(step_key(row)), "ms", "step", row["method"])
    old = {work_key(row): row for row in sitting.rows("before", "compress/rows.json")}
    for row in sitting.rows("now", "compress/rows.json"):
        for clock, what in (("ms", row["work"]), ("device_ms", f"{row['work']}, device")):
            lines += compare(row, old.get(work_key(row)), clock, what, row["name"])
    return "\n".join(lines)


def step_key(row: Row) -> tuple[Any, ...]:
    return row["model"], row["method"], row["rate"]


def work_key(row: Row) -> tuple[Any, ...]:
    return row["model"], row["name"], row["work"], row["density"]


def compare(row: Row, old: Row | None, clock: str, what: str, name: str) -> list[str]:
    if old is None or not row.get(clock) or not old.get(clock):
        return []
    before, now = old[clock], row[clock]
    cells = [row["model"], name, what, f"{before:.2f} ms", f"{now:.2f} ms", f"{now / before:.3f}"]
    return ["| " + " | ".join(cells) + " |"]


def main() -> None:
    options = parse()
    sitting = Sitting(options)
    order = ["before", "now"]
    what = options.what.split(",")
    for model in options.models.split(",") if "steps" in what else ():
        for version in order:
            sitting.measure_steps(model, version)
        # So that no version always comes first.
        order = order[::-1]
    for version in order if "compress" in what else ():
        sitting.measure_compression(version)
    table = make_table(sitting)
    (options.out / "table.md").write_text(table + "\n")
    print(table, flush=True)


if __name__ == "__main__":
    main()
