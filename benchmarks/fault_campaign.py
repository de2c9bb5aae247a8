"""The fault campaign: jobs are killed, stopped, starved of disk and network, fed with bad batches and damaged payloads.

    python benchmarks/fault_campaign.py                         # everything, in a quarter to half an hour on two cores
    python benchmarks/fault_campaign.py --only kills,disk       # some parts
    python benchmarks/fault_campaign.py --scale 0.05            # a twentieth of every part

Counts are saved after every unit: the same command goes on where it was stopped, and --again forgets what was counted. The exit code is
1 if a count that must be 0 is not. Linux only; cutting links and small disks need root, as `thinwire lab` does.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
# Workers of the real command look for the task there.
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
os.environ["OMP_NUM_THREADS"] = "1"

from faults import batches, cycles, disk, growth, kills, links, payloads  # noqa: E402
from faults.parts import Book, Part, failures  # noqa: E402

BITS = ("hangs", "other bits", "torn checkpoints")
PARTS = (
    Part(
        name="kills", harm="`thinwire train` killed, stopped or interrupted", units=100, run=kills.run,
        zero=(*BITS, "leftovers", "tracebacks shown"),
    ),
    Part(
        name="cycles", harm="workers killed and the run resumed, half of them while a checkpoint is written",
        units=100, run=cycles.run, zero=BITS,
    ),
    Part(
        name="disk", harm="checkpoints onto a disk that is full or read-only", units=100, run=disk.run,
        zero=("damaged", "said nothing", "did not recover", "failed otherwise"),
    ),
    Part(
        name="infinities", harm="infinities under a GradScaler", units=1000, run=batches.run_infinities,
        zero=("steps lost beside", "not finite", "replicas that differ"),
    ),
    Part(
        name="batches", harm="gradients 1000 times too large, skipped by the user's rule", units=1000,
        run=batches.run_bad_batches, zero=("steps lost beside", "not finite", "replicas that differ"),
    ),
    Part(
        name="payloads", harm="payloads with one bit flipped, at a sender or at a receiver", units=2100,
        run=payloads.run_payloads, zero=("silent differences", "raised on some ranks only"),
    ),
    Part(
        name="checksums", harm="the checksums' own words with one bit flipped, at a sender or at a receiver", units=1600,
        run=payloads.run_checksums, zero=("silent differences", "raised on some ranks only"),
    ),
    Part(
        name="replicas", harm="a bit of a parameter flipped on one rank, under watch", units=200,
        run=payloads.run_replicas, zero=("silent differences",),
    ),
    Part(
        name="steps", harm="steps of one process", units=3000, run=growth.run_steps,
        zero=("memory grown", "threads more", "descriptors more"),
    ),
    Part(
        name="handles", harm="attach, switch, close", units=200, run=growth.run_handles,
        zero=("memory grown", "threads more", "descriptors more"),
    ),
    Part(
        name="dropped", harm="attach, switch, and forget the handle without closing it", units=40,
        run=growth.run_dropped, zero=("memory grown", "threads more", "descriptors more"),
    ),
    Part(
        name="links", harm="the link of a host cut in mid-training, and the run resumed", units=4,
        run=links.run, zero=(*BITS, "tracebacks shown"),
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("--only", default=names, help=f"some of {names}")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the units of every part")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="folder of counts")
    parser.add_argument("--again", action="store_true", help="forget what was counted")
    asked = parser.parse_args()
    chosen = asked.only.split(",")
    unknown = set(chosen) - {part.name for part in PARTS}
    if unknown or not 0 < asked.scale <= 10:
        parser.error(f"--only takes {names}, and --scale a number above 0 and up to 10")
    if asked.again:
        shutil.rmtree(asked.out, ignore_errors=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    book = Book(asked.out / "counts.json")
    wanted = [part for part in PARTS if part.name in chosen]
    for part in wanted:
        do(part, math.ceil(part.units * asked.scale), book, asked.out.resolve())
    bad = {part.name: failures(part, book.tallies.get(part.name, {})) for part in wanted}
    show(wanted, book)
    for name, counts in bad.items():
        for count in counts:
            print(f"{name}: {book.tallies[name][count]:g} {count}, which must be 0")
    return 1 if any(bad.values()) else 0


def do(part: Part, units: int, book: Book, out: Path) -> None:
    began, first = time.monotonic(), book.done(part.name)
    for tally in part.run(first, units, out / part.name):
        seconds = time.monotonic() - began
        book.add(part.name, {**tally, "seconds": seconds})
        began = time.monotonic()
        done = book.done(part.name)
        total = book.tallies[part.name]["seconds"]
        left = (units - done) * total / max(done, 1)
        line = f"{part.name}: {done} of {units}, {total:.0f} s, {left:.0f} s left"
        print(
            f"\r{line:<70}" if sys.stdout.isatty() else line,
            end="" if sys.stdout.isatty() else "\n",
        )
        sys.stdout.flush()
    if sys.stdout.isatty():
        print()


def show(parts: list[Part], book: Book) -> None:
    """As a table of docs/campaign.md."""
    print("\n| part | what was done | how often | what came of it |\n|---|---|---|---|")
    for part in parts:
        tally = dict(book.tallies.get(part.name, {}))
        units = tally.pop("units", 0)
        listed = [f"{name} {count:g}" for name, count in tally.items() if name != "seconds"]
        listed += [f"{name} 0" for name in part.zero if name not in tally]
        print(f"| {part.name} | {part.harm} | {units:g} | {', '.join(listed)} |")


if __name__ == "__main__":
    sys.exit(main())
