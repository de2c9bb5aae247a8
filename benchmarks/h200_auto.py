"""tw.Auto against the best fixed method, in the same processes: models x link rates, on one GPU.

    sudo python3 benchmarks/h200_auto.py --out out --partial
    sudo python3 benchmarks/h200_auto.py --out out --partial      # again: only what is missing
    sudo python3 benchmarks/h200_auto.py --out out --device cpu --models small --rates 500mbit,100mbit --workers 2

Four hosts of an emulated cluster, one process each, which serve all rates of a model: the links change under them, from fast to
slow. Every row attaches anew: let Auto measure, try and settle, time its steps; then switch the same handle to each candidate that
may be faster and time that too; then steps without communication. A row has what was chosen, the regret against the best
fixed method, predicted against measured times, and what the link really gave. `--partial` adds rows of partial sparsification,
at rates at which dense steps take under 1.5 s. Rows are saved one by one, and what does not fit into `--minutes` is left for the next run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "carry" / "python")]
sys.path[:0] = PATHS

MARGIN_S = 12.0
"""Left at the end for stopping processes and taking the lab down."""
LEAST_S = 45.0
"""With less than this left a model is not begun."""
MODEL_S = 240.0

JOB = ("model", "workers", "device")

Row = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--minutes", type=float, default=9.3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default="bert-large,resnet152,vgg16,vit-large,gpt2")
    parser.add_argument("--rates", default="25gbit,10gbit,1gbit")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--optimizer", choices=("momentum", "adamw"), default="adamw")
    parser.add_argument("--quality", choices=("safe", "balanced", "fastest"), default="balanced")
    parser.add_argument("--partial", action="store_true", help="also tw.ADTopK(partial=True)")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--no-mps", action="store_true")
    return parser.parse_args()


class Sitting:
    """Rows so far, and what is left of the time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.deadline = self.began + 60 * options.minutes - MARGIN_S
        options.out.mkdir(parents=True, exist_ok=True)
        self._file: Path = options.out / "rows.json"
        self.rows: list[Row] = json.loads(self._file.read_text()) if self._file.exists() else []

    def tasks(self, model: str) -> list[Row]:
        """The rows of a model that are missing, fast links first; Auto's prediction comes before what depends on it."""
        from thinwire.lab.rates import parse_bits

        options, found = self.options, []
        common = dict(zip(JOB, (model, options.workers, options.device), strict=True))
        for rate in sorted(options.rates.split(","), key=parse_bits, reverse=True):
            auto = {"what": "auto", "optimizer": options.optimizer, "quality": options.quality}
            partial = {"what": "partial", "optimizer": "sgd"}
            found += [{**common, "rate": rate, **auto}]
            found += [{**common, "rate": rate, **partial}] if options.partial else []
        return [task for task in found if not any(task.items() <= row.items() for row in self.rows)]

    def dense_ms(self, task: Row) -> dict[str, float]:
        """What a dense step is predicted to take by rate, from earlier rows of the same job."""
        same = [row for row in self.rows if all(row[k] == task[k] for k in JOB)]
        return {row["rate"]: row["dense_ms"] for row in same if row["what"] == "auto"}

    def measure(self, model: str, mps: bool) -> None:
        """Start a model's processes, change the links as they ask for it, and keep their rows as they come."""
        from auto_worker import ASKS, TELLS

        from thinwire.bench.step_cell import plan_cell
        from thinwire.lab import Lab, LabSpec

        options, tasks = self.options, self.tasks(model)
        left = self.deadline - time.monotonic()
        if tasks and left < LEAST_S:
            self.say(f"{model}: {len(tasks)} rows are left for the next run")
        if not tasks or left < LEAST_S:
            return
        on_gpu = options.device == "cuda"
        amp = "bf16" if on_gpu else "none"
        cell = plan_cell(model, "dense", workers=options.workers, device=options.device, amp=amp)
        first = tasks[0]["rate"]
        spec = LabSpec(hosts=options.workers, rate=first, share_gpu=on_gpu, mps=mps)
        with tempfile.TemporaryDirectory() as folder, Lab(spec) as lab:
            answer = Path(folder, "rate")

            def listen(line: str, stream: TextIO) -> None:
                if ASKS in line:
                    rate = line.rpartition(" ")[2]
                    lab.change_rate(rate)
                    answer.write_text(rate)
                elif TELLS in line:
                    self.keep(json.loads(line.partition(TELLS)[2]))

            settings = {
                "cell": cell.to_dict(),
                "tasks": tasks,
                "steps": options.steps,
                "answer": str(answer),
                "dense_ms": self.dense_ms(tasks[0]),
            }
            worker = str(ROOT / "benchmarks" / "auto_worker.py")
            # What a worker says last shall be why it ended.
            command = [sys.executable, "-W", "ignore::FutureWarning", worker, json.dumps(settings)]
            ended = lab.run(command, timeout_s=min(left, MODEL_S), echo=listen, as_root=True)
        if ended.exit_code:
            worst = max(ended.ranks, key=lambda rank: (not rank.stopped, rank.exit_code))
            lines = [
                line for line in worst.output.splitlines() if not line.startswith((ASKS, TELLS))
            ]
            self.say("\n".join([f"{model}: {ended.reason}", *lines[-12:]]))

    def keep(self, row: Row) -> None:
        from thinwire.tools.files import write_text

        self.rows.append(row)
        write_text(self._file, json.dumps(self.rows, indent=1))
        self.say(f"{row['model']} at {row['rate']}{summarise(row)}, {row['seconds']:.0f} s")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)


def summarise(row: Row) -> str:
    if "skipped" in row:
        return f", partial: not measured, {row['skipped']}"
    if row["what"] == "partial":
        return (
            f", partial: none {row['none_ms']:.1f} ms, all {row['all_ms']:.1f}, partial {row['partial_ms']:.1f} with "
            f"{row['tensors_dense']} of {row['tensors']} tensors dense, link {row['link_gbit']:.2g} Gbit/s"
        )
    return (
        f": auto {row['auto_ms']:.1f} ms with {row['chosen']}, best fixed {row['best']} {row['best_ms']:.1f} ms, "
        f"regret {row['regret']:+.1%}, link {row['link_gbit']:.2g} Gbit/s, no communication {row['no_sync_ms']:.1f} ms, "
        f"thought to be {row['thought_silent_ms']:.1f}\n" + "\n".join(row["history"])
    )


def main() -> None:
    options = parse()
    sitting = Sitting(options)
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *([inherited] if inherited else [])])
    if options.device == "cuda":
        # The first import from a cold disk must not count against the first model.
        subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=False)

    from thinwire.lab.mps import CONTROL

    mps = options.device == "cuda" and not options.no_mps and shutil.which(CONTROL) is not None
    for model in options.models.split(","):
        sitting.measure(model, mps)
    sitting.say(f"{len(sitting.rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
