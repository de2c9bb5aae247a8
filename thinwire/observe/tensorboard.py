"""TensorBoard: the records of metrics.jsonl as event files, one folder per run."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from thinwire.observe.metrics import Record

TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "wire_bytes": "exchange/wire_bytes",
    "exposed_ms": "exchange/exposed_ms",
    "ms": "time/ms_per_step",
}


class TensorBoard:
    """Takes the records as they come. A resumed run hides what it does again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}

    def show(self, record: Record) -> None:
        run, event = record["run"], record["event"]
        if event == "start":
            self._writers[run] = SummaryWriter(self._folder / run, purge_step=record["step"] + 1)
            return
        writer = self._writers[run]
        if event == "step":
            for key, tag in TAGS.items():
                if key in record:
                    writer.add_scalar(tag, record[key], record["step"])
            return
        for name, value in record["metrics"].items():
            writer.add_scalar(f"test/{name}", value, record["step"])
        writer.flush()
