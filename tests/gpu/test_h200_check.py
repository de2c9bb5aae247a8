"""The script for a sitting at a GPU: what it makes of the results, and its benchmark stage on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
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


def test_a_report_of_pytest_is_read(check, tmp_path):
    report = tmp_path / "pytest.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="fine"/>'
        '<testcase classname="a" name="gone"><skipped/></testcase>'
        '<testcase classname="a" name="bad"><failure message="1 != 2"/></testcase>'
        "</testsuite></testsuites>"
    )
    result = check.read_junit(report)
    assert result["status"] == "failed" and result["summary"] == "1 passed, 1 skipped, 1 failed"
    assert result["failures"] == ["a::bad: 1 != 2"]


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

    def __init__(self) -> None:
        self.starts = 0

    def run(self, command, limit):
        self.starts += 1
        file = Path(command[command.index("--out") + 1])
        status = "started" if self.starts == 1 else "ok"
        file.write_text(json.dumps([{"method": "topk", "check": "resume", "status": status}]))
        ranks = [SimpleNamespace(output="said something")]
        code, reason = (75, "rank 1 left.") if self.starts == 1 else (0, "")
        return SimpleNamespace(exit_code=code, reason=reason, ranks=ranks)


def test_ranks_are_started_again_after_a_crash(check, tmp_path):
    options = SimpleNamespace(out=tmp_path, device="cpu", race_steps=1, check_methods="topk")
    hosts, said = Crashing(), []
    result = check.run_ranks("contracts", options, hosts, 60.0, said.append)
    assert (result["status"], result["summary"]) == ("ok", "1 ok (2 starts)")
    assert said == ["contracts: rank 1 left. Going on with the next check."]
    assert (tmp_path / "contracts-1.txt").read_text() == "said something"
