"""The script for a sitting at a GPU: what it makes of the results, and its benchmark stage on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "h200_check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("h200_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_of_pytest_are_read_as_one(check, tmp_path):
    case = '<testsuites><testsuite><testcase classname="{}" name="{}">{}</testcase></testsuite></testsuites>'
    for number, what in enumerate(("", "<skipped/>", '<failure message="1 != 2"/>')):
        (tmp_path / f"{number}.xml").write_text(case.format("a", f"test_{number}", what))
    result = check.read_junit(tmp_path.glob("*.xml"))
    assert result["status"] == "failed" and result["summary"] == "1 passed, 1 skipped, 1 failed"
    assert result["failures"] == ["a::test_2: 1 != 2"]
    result = check.read_junit([tmp_path / "0.xml"], ["b: time was up"])
    assert result["status"] == "failed" and result["failures"] == ["b: time was up"]
    assert result["summary"] == "1 passed, 0 skipped, 0 failed; 1 files broke off"
    assert check.read_junit([tmp_path / "0.xml"])["status"] == "ok"


def test_only_files_with_tests_for_a_gpu_are_run(check):
    found = [str(file) for file in check.find_gpu_tests()]
    assert {"tests/gpu/test_split.py", "tests/engine/test_gpu.py", "tests/wire/test_cuda.py"} <= {
        *found
    }
    assert not [name for name in found if name.startswith("tests/kernels")]


WITHOUT = """
import sys
from importlib import import_module

for missing in ("typer", "rich", "hypothesis", "pytest_timeout"):
    sys.modules[missing] = None
for name in sys.argv[1:]:
    import_module(name)
"""


def test_tests_and_rank_scripts_need_neither_typer_nor_rich(check):
    files = [".".join(file.with_suffix("").parts) for file in check.find_gpu_tests()]
    command = [sys.executable, "-c", WITHOUT, *files, *check.MODULES.values()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=check.ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_file_leaves_a_report_or_a_reason(check, tmp_path, monkeypatch):
    monkeypatch.chdir(check.ROOT)
    file = Path("tests/gpu/test_split.py")
    assert "time was up" in check.run_file(file, tmp_path, 0.0)
    assert check.run_file(file, tmp_path, time.monotonic() + 100.0) == ""
    assert (tmp_path / "gpu-test_split.xml").exists()
    assert "ended with 4" in check.run_file(Path("nowhere.py"), tmp_path, time.monotonic() + 100.0)


def test_verdicts_become_a_summary(check):
    verdicts = [
        {"method": "topk", "check": "race", "status": "ok", "note": "fine"},
        {"method": "dgc", "check": "race", "status": "broken", "note": "Traceback\nno luck\n"},
        {"method": "dgc", "check": "resume", "status": "started"},
    ]
    result = check.summarise_verdicts(verdicts, "", 2)
    assert result["summary"] == "1 ok, 1 broken, 1 started (2 starts)"
    assert result["failures"] == ["dgc race: broken no luck", "dgc resume: started "]
    assert check.summarise_verdicts(verdicts[:1], "", 1)["status"] == "ok"
    assert check.summarise_verdicts(verdicts[:1], "time was up.", 1)["status"] == "failed"


@pytest.mark.slow
def test_the_benchmark_stage_leaves_rows_and_a_summary(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--stages", "compress"]
    command += ["--models", "tests.bench.test_compress:mixed,nobody", "--methods", "topk"]
    command += ["--densities", "0.05", "--seconds", "0.01", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "nobody is left out: model is 'nobody'" in done.stdout
    assert "topk 0.05" in done.stdout.partition("summary")[2] and len(done.stdout) < 10_000
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["compress"]["status"] == "ok"
    assert len(json.loads((tmp_path / "compress" / "rows.json").read_text())) > 10


class Crashing:
    """Hosts on which the first start ends in the middle and the second comes through."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.starts = 0
        self.command: list[str] = []

    def run(self, command, limit):
        self.starts += 1
        self.command = command
        file = Path(command[command.index("--out") + 1])
        status = "started" if self.starts == 1 else "ok"
        file.write_text(json.dumps([{"method": "topk", "check": "resume", "status": status}]))
        ranks = [SimpleNamespace(output="said something")]
        code, reason = (self.code, "rank 1 left.") if self.starts == 1 else (0, "")
        return SimpleNamespace(exit_code=code, reason=reason, ranks=ranks)


def make_options(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(
        out=folder, device="cpu", race_steps=7, check_methods="dense,gtopk", hsdp_methods="acpsgd"
    )


@pytest.mark.parametrize("code", [75, 1])
def test_ranks_are_started_again_after_a_crash(check, tmp_path, code):
    hosts, said = Crashing(code), []
    result = check.run_ranks("contracts", make_options(tmp_path), hosts, 60.0, said.append)
    assert (result["status"], result["summary"]) == ("ok", "1 ok (2 starts)")
    assert said == ["contracts: rank 1 left. Going on with the next check."]
    assert (tmp_path / "contracts-1.txt").read_text() == "said something"


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("contracts", ["--limit", "120", "dense", "gtopk"]),
        ("race", ["--limit", "60", "--steps", "7"]),
        ("hsdp", ["--limit", "120", "acpsgd"]),
    ],
)
def test_every_stage_has_methods_and_a_limit_of_its_own(check, tmp_path, stage, expected):
    hosts = Crashing(75)
    check.run_ranks(stage, make_options(tmp_path), hosts, 60.0, print)
    assert hosts.command[-len(expected) :] == expected
