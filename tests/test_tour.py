"""CONTRIBUTING's tour is true: a real bucket passes its files in the order in which they are listed."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

ROOT = Path(__file__).parents[1]
STATION = re.compile(r"^(\d+)\. `(thinwire/\S+\.py)`: `(?:\w+\.)?(\w+)`", re.MULTILINE)


def stations() -> list[tuple[str, str]]:
    """(file, function) in the order of the list."""
    found = STATION.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    return [(file, function) for _, file, function in found]


def passed_job(rank: int, world: int) -> list[tuple[str, str]]:
    """(file, function) of everything in the package that one backward calls, in the order of the first calls."""
    package = Path(tw.__file__).parents[1]
    passed: dict[tuple[str, str], None] = {}
    noting = False

    def note(frame, event, _) -> None:
        if noting and event == "call":
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(package / "thinwire"):
                passed.setdefault((str(file.relative_to(package)), frame.f_code.co_name))

    threading.setprofile(note)  # for the driver's thread, which does not run yet
    ddp = DistributedDataParallel(nn.Linear(200, 300))
    handle = tw.attach(ddp, tw.ADTopK(density=0.01))
    for step in range(3):
        loss = ddp(torch.randn(8, 200)).square().mean()
        noting = step == 2
        sys.setprofile(note if noting else None)
        loss.backward()
        sys.setprofile(None)
        ddp.zero_grad()
    threading.setprofile(None)
    handle.close()
    return list(passed)


def test_a_bucket_passes_the_stations_in_order(pools):
    listed = stations()
    assert len({file for file, _ in listed}) == len(listed) <= 15
    for passed in pools(2).run(passed_job):
        assert [station for station in listed if station not in passed] == []
        assert sorted(listed, key=passed.index) == listed
