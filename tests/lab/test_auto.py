"""tw.Auto on shaped links: a fast one is left alone, and when it slows down all ranks compress from the same step on."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec

WORKER = Path(__file__).with_name("auto_worker.py")


@pytest.mark.root
@pytest.mark.slow
def test_a_link_that_slows_down_in_mid_run() -> None:
    with Lab(LabSpec(hosts=2, rate="10gbit")) as lab:
        slowed = threading.Event()

        def listen(line: str, stream: str) -> None:
            if "settled" in line and not slowed.is_set():
                slowed.set()
                lab.change_rate("20mbit")

        command = [sys.executable, str(WORKER)]
        result = lab.run(command, timeout_s=150, echo=listen, as_root=True)
    assert (result.exit_code, result.reason) == (0, ""), result.ranks[0].output
    assert slowed.is_set()
    said = [
        {line.split()[0]: line.split()[1:] for line in rank.output.splitlines() if line}
        for rank in result.ranks
    ]
    first, second = said
    assert first["first"] == ["dense"], result.ranks[0].output
    assert first["then"] != ["dense"], result.ranks[0].output
    for key in ("then", "steps", "weights"):
        assert first[key] == second[key]


@pytest.mark.root
def test_an_unshaped_link_cannot_be_given_a_rate() -> None:
    with Lab(LabSpec(hosts=1)) as lab, pytest.raises(UsageError, match="only links with a rate"):
        lab.change_rate("1gbit")
