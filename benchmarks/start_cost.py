"""What the command line takes to answer: milliseconds of `thinwire --version`, `--help` and `train --help`, process start included.

    python3 benchmarks/start_cost.py --repeats 9 --out benchmarks/start-cost.csv

Each is started in turns; the row has the median, the fastest and the processor's time, whether torch was imported, and how busy the machine was.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from thinwire.tools.files import format_csv
from thinwire.tools.provenance import describe_origin

ASKED = ("--version", "--help", "train --help")
LOOK = (
    "import sys; from thinwire.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
)


def time_start(arguments: list[str]) -> tuple[float, float]:
    """Milliseconds until it has answered, and of the processor, which other work on the machine changes less."""
    began, used = time.perf_counter(), time_of_children()
    subprocess.run([sys.executable, "-m", "thinwire", *arguments], check=True, capture_output=True)
    return 1e3 * (time.perf_counter() - began), 1e3 * (time_of_children() - used)


def time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def imports_torch(arguments: list[str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.split()[-1] == "True"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the rows there, as CSV")
    given = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {asked: [] for asked in ASKED}
    for _ in range(given.repeats):
        for asked, found in times.items():
            found.append(time_start(asked.split()))
    rows, origin = [], describe_origin()
    for asked, found in times.items():
        row = {
            "command": f"thinwire {asked}",
            "ms": round(statistics.median(wall for wall, _ in found)),
            "fastest_ms": round(min(wall for wall, _ in found)),
            "cpu_ms": round(statistics.median(used for _, used in found)),
            "imports_torch": imports_torch(asked.split()),
            "repeats": given.repeats,
            "load": round(os.getloadavg()[0], 1),
            "cores": os.cpu_count(),
            "cpu": origin["hardware"]["cpu"],
            "date": origin["date"],
            "commit": origin["commit"],
        }
        torch = "with torch" if row["imports_torch"] else "without torch"
        print(f"{row['command']}: {row['ms']} ms, {row['cpu_ms']} of the processor, {torch}")
        rows.append(row)
    if given.out is not None:
        given.out.write_text(format_csv(list(rows[0]), rows))


if __name__ == "__main__":
    main()
