"""Trackers: the records of metrics.jsonl in TensorBoard, Weights & Biases or MLflow, a run of theirs for each of ours."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from thinwire.observe import write_values
from thinwire.tools.files import write_text
from thinwire.tools.metrics import Record

TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "wire_bytes": "exchange/wire_bytes",
    "exposed_ms": "exchange/exposed_ms",
    "ms": "time/ms_per_step",
}
PROJECT = "thinwire"
FLUSH_SECONDS = 10


def curves(record: Record) -> dict[str, float]:
    """What a record adds to the curves: of a step its times and bytes, of a test the scores and what the handle counted."""
    values: dict[str, Any] = {tag: record[key] for key, tag in TAGS.items() if key in record}
    values |= {f"test/{name}": value for name, value in record.get("metrics", {}).items()}
    values |= record.get("stats", {})
    return {name: v for name, v in values.items() if v is not None and math.isfinite(v)}


class Tracker(ABC):
    """Takes the records as they come. `folder` is that of the job, `settings` are the job's."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self._writers: dict[str, Any] = {}

    def show(self, record: Record) -> None:
        run = record["run"]
        if record["event"] == "start":
            self._writers[run] = self.open(run, record["step"])
        elif values := curves(record):
            write_values(self._writers[run], values, record["step"])

    @abstractmethod
    def open(self, run: str, step: int) -> Any:
        """What `handle.log` could write to. A run that was resumed begins at a later `step` than 0."""

    @abstractmethod
    def end(self, writer: Any) -> None:
        """The job is over, and nothing is called when its process ends."""

    def close(self) -> None:
        for writer in self._writers.values():
            self.end(writer)

    def same_id(self, run: str, step: int, make: Callable[[], str]) -> str:
        """What a run is called there: what it was called before, if it is resumed."""
        kept = self.folder / PROJECT / f"{type(self).__name__.lower()}-{run}.id"
        if step and kept.is_file():
            return kept.read_text().strip()
        kept.parent.mkdir(exist_ok=True)
        write_text(kept, name := make())
        return name


class TensorBoard(Tracker):
    """Event files in the run folder. What a resumed run does again is hidden."""

    def open(self, run: str, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder / "tensorboard" / run
        return SummaryWriter(folder, purge_step=step + 1, flush_secs=FLUSH_SECONDS)

    def end(self, writer: Any) -> None:
        writer.close()


class Wandb(Tracker):
    """Weights & Biases; WANDB_MODE=offline keeps everything in the run folder."""

    def open(self, run: str, step: int) -> Any:
        import wandb

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=self.folder.name,
            name=run,
            id=self.same_id(run, step, partial(token_hex, 4)),
            resume="allow",
            dir=self.folder,
            config=dict(self.settings),
            # A comparison has several at once, and prints its own progress.
            reinit="create_new",
            settings=wandb.Settings(console="off"),
        )

    def end(self, writer: Any) -> None:
        writer.finish()


class Mlflow(Tracker):
    """MLflow: the server of MLFLOW_TRACKING_URI, or a folder of the run."""

    def open(self, run: str, step: int) -> Any:
        from mlflow.tracking import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            # Newer versions ask for a word before they use a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place = (self.folder / "mlflow").absolute().as_uri()
        client = MlflowClient(place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)

        def make() -> str:
            made = client.create_run(experiment, run_name=run).info.run_id
            for key, value in flatten(self.settings).items():
                client.log_param(made, key, value)
            return str(made)

        return MlflowRun(client, self.same_id(run, step, make))

    def end(self, writer: Any) -> None:
        writer.client.set_terminated(writer.id)


class MlflowRun:
    """One of several runs, where `mlflow` itself has one at a time."""

    def __init__(self, client: Any, id: str) -> None:
        self.client, self.id = client, id

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1e3 * time.time())
        self.client.log_batch(
            self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()]
        )


def flatten(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """{"training": {"lr": 0.1}} as {"training.lr": "0.1"}."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = str(value)
    return flat


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
"""By the setting that asks for each, which is also the name of the package and of thinwire's extra."""
