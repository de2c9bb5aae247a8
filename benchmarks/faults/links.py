"""Links that are cut: the workers of `thinwire train` on two emulated hosts lose each other, say so, and the run is resumed.

Needs what `thinwire lab` needs.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from faults.bits import LABEL, WORLD, compare, newest, reference
from faults.kills import wait_until
from faults.parts import Tally
from faults.task import DELAY, STEPS
from thinwire.lab import Lab, LabSpec, RunResult
from thinwire.lab.network import interface_index, open_namespace
from thinwire.lab.topology import INTERFACE

TIMEOUT_S = 5
LIMIT_S = 40.0
"""From the cut to the end of all workers."""


def run(first: int, last: int, folder: Path) -> Iterator[Tally]:
    wanted = reference(folder)
    for _ in range(first, last):
        out = folder / "run"
        if newest(out) > STEPS // 2:
            shutil.rmtree(out)
        yield cut(out, wanted)


def cut(out: Path, wanted: dict[str, str]) -> Tally:
    words = f"train faults.task:TASK --method {LABEL} --density 0.1 --steps {STEPS} --checkpoint-every 1"
    words += f" --deterministic --device cpu --timeout {TIMEOUT_S} --resume --set method.dense_fallback=false"
    command = [sys.executable, "-m", "thinwire", *words.split(), "--out", str(out)]
    before = newest(out)
    results: list[RunResult] = []
    with Lab(LabSpec(hosts=WORLD)) as lab:
        job = threading.Thread(
            target=lambda: results.append(
                lab.run(command, env={DELAY: "0.02"}, timeout_s=60 + LIMIT_S)
            )
        )
        job.start()
        started = wait_until(lambda: newest(out) > before + 5, 60)
        began = time.monotonic()
        with open_namespace(lab.topology.hosts[1].namespace) as host:
            host.link("set", index=interface_index(host, INTERFACE), state="down")
        job.join()
        seconds = time.monotonic() - began
    said = "".join(rank.output for rank in results[0].ranks)
    return {
        "units": 1,
        "resumed": float(before > 0),
        "told by a worker": float(started and results[0].exit_code not in (0, 124)),
        "tracebacks shown": float("Traceback" in said),
        "hangs": float(seconds > LIMIT_S or not started),
        "slowest end in s": round(seconds, 1),
        **compare(out, wanted),
    }
