"""Assembly: the trainer of one cell, put together from the parts of its job."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from thinwire.errors import UsageError
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.examples import Data
from thinwire.recipes.job import Cell, Job
from thinwire.recipes.loop import Run, Trainer, count_steps_per_epoch
from thinwire.recipes.parallel import Workers
from thinwire.recipes.tasks import Task
from thinwire.tools.methods import find_preset
from thinwire.tools.metrics import MetricsLog

CHECKPOINTS = "checkpoints"
"""A folder in the run folder, with one for each cell."""


def make_trainer(
    job: Job, cell: Cell, task: Task, data: Data, workers: Workers, log: MetricsLog
) -> Trainer:
    """The model as its seed begins it, and all that is needed to train it."""
    lr = cell.training.lr * find_preset(cell.method).lr_scale
    run = Run(
        label=cell.label,
        method_name=cell.method,
        method=cell.build_method(count_steps_per_epoch(data.train, cell.training, workers.world)),
        training=replace(cell.training, lr=lr),
        stop_after=job.running.steps,
        deterministic=job.running.deterministic,
        about=cell.about,
    )
    folder = job.out / CHECKPOINTS / cell.label
    torch.manual_seed(cell.training.seed)
    model = task.build(data.kind, job.source.tiny)
    on_damage = refuse_damage if job.evaluate else partial(note_damage, log, cell.label)
    checkpoints = Checkpoints(folder, workers, job.running.checkpoint_every, on_damage)
    return Trainer(run, model, data, workers, log, checkpoints)


def note_damage(log: MetricsLog, run: str, damage: str) -> None:
    note(log, run, f"{damage}; an older one is taken")


def refuse_damage(damage: str) -> None:
    """A test of another state than the user thinks would mislead."""
    raise UsageError(f"{damage}; remove it to test another")


def note(log: MetricsLog, run: str, sentence: str) -> None:
    """Tell the user something before a run begins."""
    log.add([{"run": run, "event": "note", "step": 0, "sentence": sentence}])
