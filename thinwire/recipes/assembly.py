"""Assembly: the trainer of one cell, put together from the parts of its job."""

from __future__ import annotations

from dataclasses import replace

import torch

from thinwire.methods.registry import find_preset
from thinwire.observe.metrics import MetricsLog
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.examples import Data
from thinwire.recipes.job import Cell, Job
from thinwire.recipes.loop import Run, Trainer, count_steps_per_epoch
from thinwire.recipes.parallel import Workers
from thinwire.recipes.tasks import Task


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
    folder = job.out / "checkpoints" / cell.label
    torch.manual_seed(cell.training.seed)
    model = task.build(data.kind, job.source.tiny)
    checkpoints = Checkpoints(folder, workers, job.running.checkpoint_every)
    return Trainer(run, model, data, workers, log, checkpoints)
