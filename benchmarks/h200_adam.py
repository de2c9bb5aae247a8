"""How compression and local steps learn with AdamW: a byte-level GPT on WikiText-2 with simulated workers, for short sittings at a GPU.

    python3 benchmarks/h200_adam.py --out out                                   # five methods, one seed, one rate
    python3 benchmarks/h200_adam.py --out out --lrs 5e-4,1e-3,2e-3              # rates, for dense and the others alike
    python3 benchmarks/h200_adam.py --out out --methods dense,bit1-adam-refresh --seeds 0,1,2
    python3 benchmarks/h200_adam.py --out out --methods topk1-adam,topk1-adam@10     # the second after a dense start of 10 %
    python3 benchmarks/h200_adam.py --out out --methods dense,diloco-32,sparseloco-32 --layers 8 --width 512 --batch 2 --steps 5120 --narrow
    python3 benchmarks/h200_adam.py --out out --device cpu --tiny --data-dir DIR

Cells (method, rate, seed) train side by side, each in a process of its own. `--out` gets rows.json, which is up to date at
any moment, and summary.txt. Cells that have a row are not trained again; one that ran out of time is put aside and goes
on in the next sitting with the same --out. Without --data-dir the packed text in ./carry/data is unpacked first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
sys.path.append(str(ROOT / "carry" / "python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from learning.byte_cells import METHODS, Cell  # noqa: E402
from learning.byte_gpt import Training  # noqa: E402

from thinwire.tools.provenance import describe_origin  # noqa: E402

USUAL = "dense,int4,topk1,topk1-adam,bit1-adam-refresh"
MARGIN_S = 20.0
"""Left at the end for putting cells aside."""
SEATS = max(2, (os.cpu_count() or 1) - 4)
"""A cell's step is as much the work of a core as of the GPU, which is idle between the steps of few cells."""
TINY = {"layers": 2, "width": 64, "context": 64, "batch": 4, "workers": 4}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--data-dir", type=Path)
    names = f"with commas, each with @START where it begins otherwise; of {', '.join(METHODS)}"
    parser.add_argument("--methods", default=USUAL, help=names)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--lrs", default="1e-3")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--start", type=int, default=5, help="dense steps first, per cent of all")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a worker and step")
    parser.add_argument("--narrow", action="store_true", help="products in bf16")
    parser.add_argument("--minutes", type=float, default=9.4)
    parser.add_argument("--seats", type=int, default=SEATS, help="cells at once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--commit", help="for the rows, where this is no checkout")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    named = [name.partition("@")[0] for name in options.methods.split(",")]
    unknown = [name for name in named if name not in METHODS]
    if unknown:
        parser.error(f"--methods names {unknown[0]!r}; there are {', '.join(METHODS)}")
    return options


def list_cells(options: argparse.Namespace) -> list[Cell]:
    """The most important first: all methods at one rate and seed."""
    cells = [
        Cell(
            method=name.partition("@")[0],
            seed=int(seed),
            lr=float(lr),
            steps=options.steps,
            start=int(name.partition("@")[2] or options.start),
            workers=options.workers,
            layers=options.layers,
            width=options.width,
            batch=options.batch,
            narrow=options.narrow,
        )
        for seed in options.seeds.split(",")
        for lr in options.lrs.split(",")
        for name in options.methods.split(",")
    ]
    return [replace(cell, **TINY) for cell in cells] if options.tiny else cells


def train_cell(options: argparse.Namespace) -> int:
    """In a process of its own: the cell's row goes to standard output."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    content = json.loads(options.cell)
    until = time.monotonic() + content.pop("left")
    cell = Cell(**content)
    training = Training(cell, options.data_dir, options.device)
    aside = options.out / f"{cell.key}.pt"
    if aside.exists():
        training.load(aside)
    if training.run(until):
        aside.unlink(missing_ok=True)
        origin = describe_origin()
        origin["commit"] = options.commit or origin["commit"]
        print("ROW " + json.dumps({**training.row(), **origin}), flush=True)
        return 0
    training.save(aside)
    print(f"put aside after {training.step} steps", flush=True)
    return 0


class Sitting:
    """All cells of one call, as many at once as there are seats."""

    def __init__(self, options: argparse.Namespace, data_dir: Path, end: float) -> None:
        self.options = options
        self.data_dir = data_dir
        self.end = end
        self.path = options.out / "rows.json"
        self.rows: list[dict[str, Any]] = []
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())
        self.live: dict[str, subprocess.Popen[str]] = {}

    def run(self) -> None:
        planned = list_cells(self.options)
        waiting = [cell for cell in planned if not self.has(cell)]
        self.say(f"{len(waiting)} of {len(planned)} cells have no row yet")
        while (waiting and time.monotonic() < self.end) or self.live:
            while waiting and len(self.live) < self.options.seats and time.monotonic() < self.end:
                self.begin(waiting.pop(0))
            for key, process in list(self.live.items()):
                if process.poll() is not None:
                    self.finish(key, process)
            time.sleep(0.2)

    def has(self, cell: Cell) -> bool:
        wanted = asdict(cell)
        return any(all(row.get(k) == v for k, v in wanted.items()) for row in self.rows)

    def begin(self, cell: Cell) -> None:
        content = {**asdict(cell), "left": self.end - time.monotonic()}
        command = [sys.executable, __file__, "--cell", json.dumps(content)]
        command += ["--out", str(self.options.out), "--data-dir", str(self.data_dir)]
        command += ["--device", self.options.device]
        command += ["--commit", self.options.commit] if self.options.commit else []
        self.live[cell.key] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self, key: str, process: subprocess.Popen[str]) -> None:
        output, _ = process.communicate()
        del self.live[key]
        found = [line[4:] for line in output.splitlines() if line.startswith("ROW ")]
        if not found:
            self.say(f"{key}: {output.strip()[-600:] or f'ended with {process.returncode}'}")
            return
        row = json.loads(found[0])
        self.rows.append(row)
        self.path.write_text(json.dumps(self.rows, indent=1))
        self.say(f"{key}: loss {row['valid_loss']:.4f}, {row['bits']:.3g} bits, {row['seconds']} s")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def summarise(rows: list[dict[str, Any]]) -> str:
    """A line per method and rate: the mean loss over seeds, its spread, and what was sent."""
    groups: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["lr"], row["start"]), []).append(row)
    dense = [row["valid_loss"] for row in rows if row["method"] == "dense"]
    best = min(dense) if dense else None
    lines = [
        "method                     rate     start  seeds  loss     spread   best     bits   against dense"
    ]
    for (method, lr, start), group in sorted(groups.items()):
        losses = [row["valid_loss"] for row in group]
        mean = statistics.mean(losses)
        spread = max(losses) - min(losses)
        lowest = statistics.mean(row["best_valid_loss"] for row in group)
        against = "" if best is None else f"{100 * (mean / best - 1):+.2f} %"
        lines.append(
            f"{method:26s} {lr:<8g} {start:<6d} {len(group):<6d} {mean:.4f}   {spread:.4f}   {lowest:.4f}   "
            f"{group[0]['bits']:<6.3g} {against}"
        )
    return "\n".join(lines)


def unpack(folder: Path) -> Path:
    """The packed text that came along."""
    packed = ROOT / "carry" / "data"
    subprocess.run([sys.executable, str(packed / "unpack.py"), str(folder), "text"], check=True)
    return folder


def main() -> int:
    options = parse()
    if options.cell:
        return train_cell(options)
    from h200_learning import shared_gpu

    options.out.mkdir(parents=True, exist_ok=True)
    end = BEGAN + 60 * options.minutes - MARGIN_S
    with tempfile.TemporaryDirectory(prefix="thinwire-data-") as folder:
        data_dir = options.data_dir or unpack(Path(folder))
        sitting = Sitting(options, data_dir, end)
        with shared_gpu(options, sitting.say):
            try:
                sitting.run()
            finally:
                for process in sitting.live.values():
                    process.kill()
        text = summarise(sitting.rows)
        (options.out / "summary.txt").write_text(text + "\n")
        print(f"\n{text}", flush=True)
    return 0 if sitting.rows else 1


if __name__ == "__main__":
    sys.exit(main())
