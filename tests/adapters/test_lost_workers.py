"""A worker dies: under every adapter the others are told on which rank, in which exchange, why, and what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SENTENCE = (
    r"ExchangeError: on rank (\d) of (\d)( \(rank (\d) of the job\))? the exchange of .+ failed: .+; a worker has died, hangs or "
    r"cannot be reached, so look at the others' output and start again from a checkpoint"
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks after threads were started")
def test_a_lost_worker_is_one_sentence_under_every_adapter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.scripts.lost_workers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 11
    for one in cases:
        for rank, said in one["said"].items():
            found = re.fullmatch(SENTENCE, said)
            assert found, f"{one['case']}, rank {rank}: {said}"
            # A group of some ranks has numbers of its own.
            assert (found[4] or found[1]) == rank
