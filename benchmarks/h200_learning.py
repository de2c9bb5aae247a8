"""The learning evidence: every method against dense, with 8 simulated workers or 4, for short sittings at a GPU.

    python3 benchmarks/h200_learning.py --out out
    python3 benchmarks/h200_learning.py --out out --resume rows.json      # again: only what is missing
    python3 benchmarks/h200_learning.py --out out --device cpu --quick    # two small tasks, to see that all works

Several cells (task, method, density, seed) train at once, each in a process of its own, on the loop of `thinwire train`, in the
order of their importance: first all methods from one seed, then from the others, then what is left. The first steps show the pace;
epochs are chosen so that the most important cells are finished in time, and if time gets short the least important ones make room.
A sitting lasts `--minutes` and not longer; the next one goes on with what is missing. `--out` gets rows.json and rows.csv (finished
cells), curves.json (every epoch of every cell) and summary.txt; all of them are up to date at any moment.

Needs torch, numpy and Pillow, squad-minilm transformers; neither typer, rich nor matplotlib. Without --data-dir and THINWIRE_DATA the
packed sets in ./carry/data are unpacked first. Pretrained weights of squad-minilm are looked for in THINWIRE_WEIGHTS, else in
./carry/weights, where learning/half_weights.py can put them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# Imports take time, too.
BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
# What is installed wins.
sys.path.append(str(ROOT / "carry" / "python"))
# One core for every cell, as long as there are as many.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from learning.cells import Cell, Study, quick_studies, studies  # noqa: E402
from learning.course import Course, Say  # noqa: E402
from learning.orders import Order  # noqa: E402
from learning.seats import Seats  # noqa: E402
from learning.store import Store  # noqa: E402

from thinwire.recipes.models.weights import WEIGHTS_VARIABLE  # noqa: E402

MARGIN_S = 12.0
"""Left at the end for stopping processes and writing files."""
FEW_SEATS = 4
"""Without MPS processes take turns on the GPU, and more of them bring nothing."""
PRETRAINED = "squad-minilm"
PACKS = {
    "cifar10-resnet20": "cifar10",
    "wikitext2-lstm": "text",
    "wikitext2-small-gpt": "text",
    PRETRAINED: "text",
}
NOTES = {"cifar10-resnet20": "re-encoded", PRETRAINED: "12 articles"}
"""What to say beside the figures of a task whose data came packed."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--resume", type=Path, help="rows.json of an earlier sitting")
    parser.add_argument("--minutes", type=float, default=9.4)
    plain = ",".join(name for name in PACKS if name != PRETRAINED)
    parser.add_argument(
        "--tasks",
        default=plain,
        help=f"with commas, the first ones first; default all but {PRETRAINED}",
    )
    parser.add_argument("--methods", help="with commas; default all of the plan")
    parser.add_argument("--densities", help="with commas, such as 0.01; default all of the plan")
    parser.add_argument("--seeds", help="with commas; default all of the plan")
    parser.add_argument("--epochs", type=int, help="not planned, but given")
    parser.add_argument("--batch-size", type=int, help="per worker, in place of the plan's")
    parser.add_argument("--seats", type=int, help="cells at once; default one per core but one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny models on synthetic data")
    parser.add_argument("--commit", help="for the rows, where this is no checkout")
    options = parser.parse_args()
    unknown = [name for name in options.tasks.split(",") if name not in PACKS]
    if unknown:
        parser.error(f"--tasks names {unknown[0]!r}; there are {', '.join(PACKS)}")
    if (ROOT / "carry" / "weights").exists():
        os.environ.setdefault(WEIGHTS_VARIABLE, str(ROOT / "carry" / "weights"))
    pretrained = PRETRAINED in options.tasks.split(",") and not options.quick
    if pretrained and not os.environ.get(WEIGHTS_VARIABLE):
        parser.error(
            f"{PRETRAINED} begins from pretrained weights; name their folder in {WEIGHTS_VARIABLE}"
        )
    return options


class Sitting:
    """What the tasks of a sitting share: processes, files and the clock."""

    def __init__(
        self, options: argparse.Namespace, end: float, say: Say, data_dir: Path | None, packed: bool
    ) -> None:
        self.options = options
        self.end = end
        self.say = say
        self.store = Store(options.out, commit=options.commit, resume=options.resume)
        self.source: dict[str, Any] = {"data_dir": str(data_dir)} if data_dir is not None else {}
        if options.quick:
            self.source = {"synthetic": True, "tiny": True}
        self.notes = NOTES if packed else {}
        self.graph = options.device == "cuda" and not options.no_graph
        self.seats = Seats(self.count_seats(), say)

    def count_seats(self) -> int:
        from thinwire.tools.provenance import count_cores

        shared = self.options.device == "cpu" or "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        most = max(1, count_cores() - 1) if shared else FEW_SEATS
        return self.options.seats or most

    def count_missing(self, study: Study) -> int:
        """Cells without a row, if there are as many epochs as are asked for."""
        cells = study.cells(self.options.epochs or study.most)
        return sum(not self.store.has(cell) for cell in cells)

    def order(self, cell: Cell, graph: bool, steps: int | None) -> Order:
        settings = cell.settings(self.source, self.options.device, graph, steps)
        return Order(key=cell.key, settings=settings, deadline=self.end)

    def run(self, study: Study, end: float) -> None:
        """Train the cells of one task that have no row yet."""
        Course(
            study,
            seats=self.seats,
            store=self.store,
            say=self.say,
            order=self.order,
            end=end,
            last=self.end,
            epochs=self.options.epochs,
            graph=self.graph,
            note="synthetic" if self.options.quick else self.notes.get(study.task, ""),
        ).run()


# -- around it ---------------------------------------------------------------------------------------------------------


def begin_unpacking(options: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes] | None:
    """Unpack the data sets that came packed along with this script; None if others are used."""
    packed = ROOT / "carry" / "data"
    if options.quick or options.data_dir is not None or not (packed / "unpack.py").exists():
        return None
    wanted = dict.fromkeys(PACKS[task] for task in options.tasks.split(","))
    return subprocess.Popen([sys.executable, str(packed / "unpack.py"), str(folder), *wanted])


@contextmanager
def shared_gpu(options: argparse.Namespace, say: Say) -> Iterator[None]:
    """Processes that share the GPU run on it at the same time, where NVIDIA's service for that can be started."""
    if options.device == "cpu" or options.no_mps:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.callback(start_sharing())
            say("MPS is on")
        except Exception as error:
            say(f"MPS is off, so that processes take turns on the GPU: {error}")
        yield


def start_sharing() -> Callable[[], None]:
    """Start a daemon that the processes of this script use; returns how to stop it."""
    from thinwire.lab.mps import mps_environment, start_mps, stop_mps
    from thinwire.lab.records import Record

    record = Record.open(f"tw{os.getpid():08x}", "")

    def stop() -> None:
        stop_mps(record)
        record.close()

    try:
        start_mps(record)
    except BaseException:
        stop()
        raise
    os.environ.update(mps_environment(record))
    return stop


def choose_studies(options: argparse.Namespace) -> list[Study]:
    planned = quick_studies() if options.quick else studies()
    chosen = [study for name in options.tasks.split(",") for study in planned if study.task == name]
    if options.methods:
        # Without dense there is nothing to compare with.
        chosen = [study.only(["dense", *options.methods.split(",")]) for study in chosen]
    if options.densities:
        wanted = [float(density) for density in options.densities.split(",")]
        chosen = [study.only_at(wanted) for study in chosen]
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        chosen = [study.only_from(seeds) for study in chosen]
    if options.batch_size:
        chosen = [study.with_batch_size(options.batch_size) for study in chosen]
    return chosen


def run_all(sitting: Sitting, chosen: Sequence[Study]) -> None:
    for i, study in enumerate(chosen):
        share = study.share / sum(later.share for later in chosen[i:])
        now = time.monotonic()
        sitting.run(study, now + share * (sitting.end - now))


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="thinwire-data-") as folder:
        unpacking = begin_unpacking(options, Path(folder))
        data_dir = options.data_dir if unpacking is None else Path(folder)
        chosen = choose_studies(options)
        with shared_gpu(options, say):
            end = BEGAN + 60 * options.minutes - MARGIN_S
            sitting = Sitting(options, end, say, data_dir, packed=unpacking is not None)
            try:
                # Processes start while the data is unpacked, as many as the first task can use.
                for study in chosen[:1]:
                    sitting.seats.open(sitting.count_missing(study))
                if unpacking is not None and unpacking.wait() != 0:
                    raise RuntimeError(f"unpacking ended with {unpacking.returncode}")
                run_all(sitting, chosen)
            finally:
                sitting.seats.close()
                sitting.store.save()
                text = sitting.store.summary()
                print(f"\n{text}\n{len(sitting.store.rows)} rows in {options.out}", flush=True)
    return 0 if sitting.store.rows else 1


if __name__ == "__main__":
    sys.exit(main())
