"""All that has to be checked and measured on a GPU, for one sitting of ten minutes.

    sudo python3 benchmarks/h200_check.py --out out
    sudo python3 benchmarks/h200_check.py --out out --stages contracts,race      # again: only what has no verdict yet
    sudo python3 benchmarks/h200_check.py --out out --device cpu --models small --race-steps 20 --minutes 4

Stages, in this order: all tests marked gpu, some files at a time; steps without host waits; the contracts of every method;
payloads compared with their checksums; sharded models (these four on emulated hosts that share the GPU, see docs/lab.md);
the compression benchmark. Each has a time of its own, saves what it finds as it goes, and does not stop the next if it
fails. A check of a rank script that takes longer than it may is said to hang, and where; the next one begins.

Needs torch and pyroute2 (a copy under ./carry/python will do); pytest for the first stage, transformers and torchvision
for the real models; neither typer nor rich.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "carry" / "python")]
sys.path[:0] = PATHS

MARGIN_S = 12.0
"""Left at the end for stopping processes and taking the lab down."""
LEAST_S = 5.0
ROW_S = 15.0
"""How long the last row of the benchmark may take."""
BUDGETS_S = {
    "pytest": 130.0,
    "sync_free": 60.0,
    "contracts": 130.0,
    "race": 80.0,
    "hsdp": 90.0,
    "compress": 400.0,
}
"""The most each stage may take; what one leaves, the next ones have."""
MODULES = {name: f"tests.gpu.{name}" for name in ("sync_free", "contracts", "race", "hsdp")}
CHECK_S = {"cuda": 20.0, "cpu": 120.0}
"""How long one check of a rank script may take, by device."""
PYTEST_JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Files at a time: their processes take turns on the GPU, and to start one is most of its work."""
PYTEST_ENDS = (0, 1, 5)
"""All passed, some failed, none was selected."""
RATE = "10gbit"
KNOWN_ENDS = (0, 1)
TIME_UP = "time was up, the same command goes on with the rest"
SHOWN_FAILURES = 12
SHOWN_CHARACTERS = 220


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--minutes", type=float, default=9.3)
    parser.add_argument("--stages", default=",".join(BUDGETS_S), help="with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--no-mps", action="store_true")
    names = "with commas; default all that apply"
    parser.add_argument("--check-methods", default="", help=f"for contracts, host waits: {names}")
    parser.add_argument("--hsdp-methods", default="", help=f"for sharded models: {names}")
    parser.add_argument("--race-steps", type=int, default=1000)
    parser.add_argument("--models", default="bert-large,gpt2-large,vit-large,resnet152,vgg16")
    parser.add_argument("--densities", default="0.01,0.001")
    parser.add_argument("--methods", help="for the benchmark; default those that have an anchor")
    parser.add_argument("--seconds", type=float, default=1.0, help="per row of the benchmark")
    options = parser.parse_args()
    unknown = [name for name in options.stages.split(",") if name not in BUDGETS_S]
    if unknown:
        parser.error(f"--stages names {unknown[0]!r}; there are {', '.join(BUDGETS_S)}")
    options.out = options.out.resolve()
    return options


# -- pytest ------------------------------------------------------------------------------------------------------------


def run_pytest(options: argparse.Namespace, limit: float) -> dict[str, Any]:
    if importlib.util.find_spec("pytest") is None:
        return {"status": "not run", "summary": "pytest is not installed here"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = partial(run_file, folder=folder, deadline=time.monotonic() + limit)
        with ThreadPoolExecutor(PYTEST_JOBS) as pool:
            broken = list(filter(None, pool.map(one, find_gpu_tests())))
        logs = [log.read_text(errors="replace") for log in sorted(folder.glob("*.txt"))]
        (options.out / "pytest.txt").write_text("\n".join(logs))
        return read_junit(folder.glob("*.xml"), broken)


def find_gpu_tests() -> list[Path]:
    """Files with tests marked gpu, those with many lines first, so that none of them is alone at the end."""
    files = (ROOT / "tests").rglob("test_*.py")
    texts = {file.relative_to(ROOT): file.read_text() for file in files}
    found = [file for file, text in texts.items() if "mark.gpu" in text]
    return sorted(found, key=lambda file: (-len(texts[file]), file))


def run_file(file: Path, folder: Path, deadline: float) -> str:
    """Leaves a report and a log named after the file. Returns why it broke off, or nothing."""
    name = "-".join(file.with_suffix("").parts[1:])
    report, log = folder / f"{name}.xml", folder / f"{name}.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-m", "gpu", "-o", "addopts=", "-o", "faulthandler_timeout=60"]
    command += [f"--junitxml={report}", str(file)]
    with log.open("w") as output:
        try:
            left = max(0.0, deadline - time.monotonic())
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=left)
            ended = "" if done.returncode in PYTEST_ENDS else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "time was up"
    return f"{file}: {ended}; its log ends: {tail(log)}" if ended else ""


def read_junit(reports: Iterable[Path], broken: Sequence[str] = ()) -> dict[str, Any]:
    """All reports as one; `broken` are files that broke off, and why."""
    cases = [
        case
        for report in sorted(reports)
        for case in ElementTree.parse(report).getroot().iter("testcase")
    ]
    failures = list(broken)
    for case in cases:
        for problem in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append(f"{name}: {problem.get('message') or ''}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = len(failures) - len(broken)
    summary = f"{len(cases) - skipped - failed} passed, {skipped} skipped, {failed} failed"
    summary += f"; {len(broken)} files broke off" if broken else ""
    return {
        "status": "failed" if failures else "ok",
        "summary": summary,
        "failures": failures,
    }


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-SHOWN_CHARACTERS:].replace("\n", " | ")


# -- ranks in the lab --------------------------------------------------------------------------------------------------


class Hosts:
    """The emulated hosts, built when they are needed and again after a run that broke off."""

    def __init__(self, options: argparse.Namespace) -> None:
        from thinwire.lab import LabSpec
        from thinwire.lab.mps import CONTROL

        on_gpu = options.device == "cuda"
        mps = on_gpu and not options.no_mps and shutil.which(CONTROL) is not None
        self.spec = LabSpec(hosts=options.workers, rate=RATE, share_gpu=on_gpu, mps=mps)
        self._lab: Any = None

    def run(self, command: Sequence[str], limit: float) -> Any:
        from thinwire.lab import Lab

        if self._lab is None:
            lab = Lab(self.spec)
            lab.__enter__()
            self._lab = lab
        result = self._lab.run(command, timeout_s=limit)
        if result.exit_code not in KNOWN_ENDS:
            # Processes killed in mid-kernel can leave a shared GPU's daemon unusable.
            self.close()
        return result

    def close(self) -> None:
        if self._lab is not None:
            lab, self._lab = self._lab, None
            lab.__exit__(None, None, None)


def run_ranks(
    stage: str, options: argparse.Namespace, hosts: Hosts, limit: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start a rank script, and again after a crash, until every check has its verdict or time is up."""
    file = options.out / f"{stage}.json"
    command = [sys.executable, "-m", MODULES[stage], "--device", options.device, "--out", str(file)]
    # All of the first method's steps are one check of the races.
    most = limit if stage == "race" else CHECK_S[options.device]
    command += ["--limit", f"{most:g}"]
    command += ["--steps", str(options.race_steps)] if stage == "race" else []
    methods = options.hsdp_methods if stage == "hsdp" else options.check_methods
    command += [name for name in methods.split(",") if name and stage != "race"]
    deadline, starts, reason = time.monotonic() + limit, 0, ""
    while (left := deadline - time.monotonic()) > LEAST_S:
        known = len(load_verdicts(file))
        result = hosts.run(command, left)
        starts += 1
        output = options.out / f"{stage}-{starts}.txt"
        output.write_text("\n".join(rank.output[-20_000:] for rank in result.ranks))
        in_the_middle = any(verdict["status"] == "started" for verdict in load_verdicts(file))
        ended = result.exit_code in KNOWN_ENDS and not in_the_middle
        reason = "" if ended else result.reason
        if not reason or len(load_verdicts(file)) == known:
            break
        say(f"{stage}: {reason} Going on with the next check.")
    verdicts = load_verdicts(file)
    if not verdicts:
        return {"status": "failed", "summary": f"{reason or 'no verdict'}; see {stage}-1.txt"}
    return summarise_verdicts(verdicts, reason, starts)


def load_verdicts(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else []


def summarise_verdicts(verdicts: list[dict[str, Any]], reason: str, starts: int) -> dict[str, Any]:
    counts: dict[str, int] = {}
    failures = []
    for verdict in verdicts:
        status = verdict["status"]
        counts[status] = counts.get(status, 0) + 1
        if status not in ("ok", "skipped"):
            last = str(verdict.get("note", "")).strip().splitlines()[-1:] or [""]
            failures.append(f"{verdict['method']} {verdict['check']}: {status} {last[0]}")
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    summary += f" ({starts} starts)" if starts > 1 else ""
    summary += f"; broke off: {reason}" if reason else ""
    return {
        "status": "failed" if failures or reason else "ok",
        "summary": summary,
        "failures": failures,
        "notes": [f"{v['method']}: {v.get('note', '')}" for v in verdicts if v["check"] == "race"],
    }


# -- the compression benchmark -----------------------------------------------------------------------------------------


def compress_worker(settings: dict[str, Any]) -> None:
    """In a process of its own: an error of a kernel can leave CUDA unusable."""
    from thinwire.bench.compress import DEFAULT_METHODS, CompressSettings, measure_compress
    from thinwire.bench.compress_layout import describe_model
    from thinwire.errors import UsageError

    models = []
    for name in settings["models"]:
        try:
            describe_model(name)
            models.append(name)
        except UsageError as error:
            print(f"{name} is left out: {error}", flush=True)
    measure_compress(
        models,
        settings["densities"],
        settings["device"],
        methods=settings["methods"] or DEFAULT_METHODS,
        settings=CompressSettings(seconds=settings["seconds"]),
        out=Path(settings["out"]),
        deadline=settings["deadline"],
        say=lambda text: print(text, flush=True),
    )


def run_compress(
    options: argparse.Namespace, limit: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start the benchmark, and again after a crash as long as there are new rows."""
    folder = options.out / "compress"
    deadline, reason = time.monotonic() + limit, ""
    while (left := deadline - time.monotonic()) > LEAST_S:
        settings = {
            "models": [name for name in options.models.split(",") if name],
            "densities": [float(part) for part in options.densities.split(",")],
            "methods": [name for name in (options.methods or "").split(",") if name],
            "device": options.device,
            "seconds": options.seconds,
            "out": str(folder),
            "deadline": deadline - ROW_S,  # the clock is the same in all processes
        }
        known = len(load_rows(folder))
        process = multiprocessing.get_context("spawn").Process(
            target=compress_worker, args=(settings,)
        )
        process.start()
        process.join(left)
        if process.is_alive():
            process.kill()
            process.join()
            reason = "time was up in the middle of a row"
            break
        if process.exitcode == 0 and time.monotonic() > deadline - ROW_S:
            reason = TIME_UP
            break
        reason = "" if process.exitcode == 0 else f"the process ended with {process.exitcode}"
        if not reason or len(load_rows(folder)) == known:
            break
        say(f"compress: {reason}; going on with the next row")
    return summarise_rows(load_rows(folder), reason)


def load_rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "rows.json"
    return json.loads(file.read_text()) if file.exists() else []


def summarise_rows(rows: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    failed = [row for row in rows if row["status"] != "ok"]
    summary = f"{len(rows) - len(failed)} rows, {len(failed)} failed"
    summary += f"; broke off: {reason}" if reason else ""
    status = "failed" if failed or not rows else "ok"
    if reason and status == "ok":
        status = "unfinished" if reason == TIME_UP else "failed"
    return {
        "status": status,
        "summary": summary,
        "failures": [
            f"{row['model']} {row['tensor'] or ''} {row['name']} {row['density']}: {row['note']}"
            for row in failed
        ],
        "notes": ratio_lines([row for row in rows if row["status"] == "ok"]),
    }


def ratio_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Per method and density one line: its time as multiples of the floor, model by model, encode / decode (the device alone)."""
    whole = [row for row in rows if row["tensor"] is None]
    models = list(dict.fromkeys(row["model"] for row in whole))
    floors = {row["model"]: row for row in whole if row["kind"] == "floor"}
    lines = ["times the floor, encode/decode (device alone), of " + ", ".join(models)]
    if floors:
        speeds = [f"{r['ms']:.3f} ms {r['gb_per_s']:.0f} GB/s" for r in floors.values()]
        lines.append(f"{'floor':24} " + "  ".join(speeds))
    keys = [(row["name"], row["density"]) for row in whole if row["kind"] != "floor"]
    for name, density in dict.fromkeys(keys):
        cells = []
        for model in models:
            mine = [
                row
                for row in whole
                if (row["model"], row["name"], row["density"]) == (model, name, density)
            ]
            cells.append("/".join(f"{row['ratio']:.2f}" for row in mine if row["ratio"]) or "-")
            alone = [row["device_ms"] / row["floor_ms"] for row in mine if row["device_ms"]]
            cells[-1] += " (" + "/".join(f"{ratio:.2f}" for ratio in alone) + ")" if alone else ""
        label = name if density is None else f"{name} {density:g}"
        lines.append(f"{label:24} " + "  ".join(f"{cell:>24}" for cell in cells))
    return lines


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> None:
    began = time.monotonic()
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *([inherited] if inherited else [])])

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    hosts = Hosts(options)
    end = began + 60 * options.minutes - MARGIN_S
    results: dict[str, Any] = {}
    try:
        for stage in options.stages.split(","):
            limit = min(BUDGETS_S[stage], end - time.monotonic())
            results[stage] = run_stage(stage, options, hosts, limit, say)
            say(f"{stage}: {results[stage]['status']}, {results[stage]['summary']}")
            (options.out / "results.json").write_text(json.dumps(results, indent=1))
    finally:
        hosts.close()
        show(results, options.out)


def run_stage(
    stage: str,
    options: argparse.Namespace,
    hosts: Hosts,
    limit: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """A stage's result; whatever goes wrong in it is one too."""
    if limit < LEAST_S:
        return {"status": "not run", "summary": "no time was left", "seconds": 0.0}
    say(f"{stage}: at most {limit:.0f} s")
    mark = time.monotonic()
    try:
        if stage == "pytest":
            result = run_pytest(options, limit)
        elif stage == "compress":
            hosts.close()  # nothing else may use the GPU while it is measured
            result = run_compress(options, limit, say)
        else:
            result = run_ranks(stage, options, hosts, limit, say)
    except Exception as error:
        traceback.print_exc()
        result = {"status": "failed", "summary": f"{type(error).__name__}: {error}"[:500]}
    return {**result, "seconds": round(time.monotonic() - mark, 1)}


def show(results: dict[str, Any], folder: Path) -> None:
    """What a reader wants to know, in less than 10 kB."""
    print(f"\n== summary (all of it in {folder}) ==")
    for stage, result in results.items():
        print(
            f"{stage:10} {result['status']:8} {result['seconds']:6.1f} s  {result['summary'][:500]}"
        )
        failures = result.get("failures", [])
        for failure in failures[:SHOWN_FAILURES]:
            print("    " + failure.replace("\n", " ")[:SHOWN_CHARACTERS])
        if len(failures) > SHOWN_FAILURES:
            print(f"    and {len(failures) - SHOWN_FAILURES} more")
        for note in result.get("notes", []):
            print("    " + note[:SHOWN_CHARACTERS])


if __name__ == "__main__":
    main()
