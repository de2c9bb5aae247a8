"""The training loop, the same for every task and every method, on real workers and simulated ones."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.methods import Method
from thinwire.recipes.checkpoints import Checkpoints, State
from thinwire.recipes.config import Training
from thinwire.recipes.device import place_model
from thinwire.recipes.evaluation import evaluate
from thinwire.recipes.examples import Data, Examples
from thinwire.recipes.kinds import Carry
from thinwire.recipes.layers import describe_layers
from thinwire.recipes.optimizers import build_optimizer
from thinwire.recipes.parallel import Attachment, Workers
from thinwire.recipes.precision import Precision
from thinwire.recipes.recorder import StepRecorder
from thinwire.recipes.schedules import LearningRate
from thinwire.recipes.step import Step
from thinwire.tools.clock import Mark
from thinwire.tools.metrics import MetricsLog, Record
from thinwire.tools.results import Row

STATE_VERSION = 1
TEST_BATCHES = 4
"""A test keeps no activations, so it takes so many training batches at once."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a job, from its first step to its last."""

    label: str
    """Its name in the metrics, in the table and in the plot."""
    method_name: str
    method: Method
    training: Training
    """With the learning rate as this method needs it."""
    stop_after: int | None = None
    """Steps after which it ends early; the schedules are those of the whole training."""
    deterministic: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    """What is saved with its checkpoints, so that nobody goes on with other settings."""


@dataclass
class Position:
    """Where a run stands: everything up to here is done."""

    epoch: int = 0
    number: int = 0
    """Steps done in this epoch."""
    step: int = 0
    """Steps done in all."""


class Trainer:
    """A model in training: built, restored if it was stopped, trained, judged."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        data: Data,
        workers: Workers,
        log: MetricsLog,
        checkpoints: Checkpoints,
    ) -> None:
        self.run, self.data, self.workers, self.log = run, data, workers, log
        self.checkpoints = checkpoints
        training = run.training
        self.memory_format = (
            torch.channels_last if training.channels_last else torch.preserve_format
        )
        self.model = place_model(model, workers.device, self.memory_format)
        self.precision = Precision(training.precision, workers.device)
        self.optimizer = build_optimizer(self.model, training, run.method)
        self.steps_per_epoch = count_steps_per_epoch(data.train, training, workers.world)
        self.learning_rate = LearningRate(
            training,
            workers=workers.world,
            steps_per_epoch=self.steps_per_epoch,
            higher_is_better=data.kind.higher_is_better,
        )
        self.replica = workers.attach(
            Attachment(
                model=self.model,
                method=run.method,
                optimizer=self.optimizer,
                scaler=self.precision.scaler,
                deterministic=run.deterministic,
            )
        )
        self.position = Position()
        self.carries: dict[int, Carry] = dict.fromkeys(workers.ranks)
        self.metrics: dict[str, float] = {}
        """Of the last test."""
        self.tests: list[list[float]] = []
        """Step and score of every test so far."""
        self.best: float | None = None

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        total = self.learning_rate.total_steps
        return total if self.run.stop_after is None else min(total, self.run.stop_after)

    @property
    def examples_per_step(self) -> int:
        training = self.run.training
        return training.batch_size * training.accumulate * self.workers.world

    # -- training ----------------------------------------------------------------------------------------------

    def train(self) -> Row:
        """Collective: the steps that are still to do, a test after every epoch and at the end; returns what was measured."""
        began = time.perf_counter()
        self.log.add([self._start_record()])
        recorder = StepRecorder(
            self.run.label, self.replica, self.workers, self.log, self.position.step
        )
        while self.position.step < self.last_step:
            self._train_epoch(recorder)
            recorder.flush()
            self.test()
        if not self.tests or self.tests[-1][0] != self.position.step:
            self.test()
        if self.checkpoints.wanted:
            self.checkpoints.save(self.position.step, self.state_dict())
        return self._row(recorder, time.perf_counter() - began)

    def evaluate(self) -> Row:
        """Collective: test the model as it is."""
        began = time.perf_counter()
        self.test()
        recorder = StepRecorder(self.run.label, self.replica, self.workers, self.log)
        return self._row(recorder, time.perf_counter() - began)

    def _train_epoch(self, recorder: StepRecorder) -> None:
        """From where the run stands to the end of its epoch, or to the run's last step."""
        self.model.train()
        for step in self._steps_of_epoch():
            recorder.begin_step()
            lr = self.learning_rate.at(self.position.step)
            exposed = self._learn(step, lr)
            self.position.number += 1
            self.position.step += 1
            recorder.end_step(step.mean_loss(), exposed, lr)
            if self.position.step == self.last_step:
                break
            if self.checkpoints.is_due(self.position.step):
                # A run that goes on from here must find its past in the log.
                recorder.flush()
                self.checkpoints.save(self.position.step, self.state_dict())
        if self.position.number == self.steps_per_epoch:
            self.position.epoch += 1
            self.position.number = 0
            self.carries = dict.fromkeys(self.workers.ranks)

    def _steps_of_epoch(self) -> Iterator[Step]:
        training, epoch = self.run.training, self.position.epoch
        dealt = {
            worker: self.data.train.deal(
                seed=training.seed,
                epoch=epoch,
                rank=worker,
                world=self.workers.world,
                batch_size=training.batch_size,
            )
            for worker in self.workers.ranks
        }
        for number in range(self.position.number, self.steps_per_epoch):
            first = number * training.accumulate
            yield Step(
                kind=self.data.kind,
                examples=self.data.train,
                places={w: mine[first : first + training.accumulate] for w, mine in dealt.items()},
                carries=self.carries,
                precision=self.precision,
                device=self.workers.device,
                memory_format=self.memory_format,
                seed=training.seed,
                epoch=epoch,
                number=number,
            )

    def _learn(self, step: Step, lr: float) -> tuple[Mark, Mark] | None:
        """One optimisation step; returns between which moments communication was exposed."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        exposed = self.replica.backward(step)
        scaler, limit = self.precision.scaler, self.run.training.clip_norm
        # A method that owns momentum clips what it accumulates; here it would be too late.
        if limit is not None and not self.run.method.owns_momentum:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        scaler.step(self.optimizer)
        scaler.update()
        return exposed

    def test(self) -> None:
        """Collective: measure the model on the whole test set and log it."""
        self.replica.share_buffers()
        batch_size = TEST_BATCHES * self.run.training.batch_size
        self.metrics = evaluate(
            self.model, self.data, self.workers, self.precision, batch_size, self.memory_format
        )
        kind = self.data.kind
        score = self.metrics[kind.headline]
        self.tests.append([self.position.step, score])
        counted: dict[str, float] = {}
        self.replica.log(lambda values, step: counted.update(values))
        self.log.add(
            [
                {
                    "run": self.run.label,
                    "event": "test",
                    "step": self.position.step,
                    "score": score,
                    "metrics": self.metrics,
                    "stats": counted,
                }
            ]
        )
        if self.position.number == 0:
            # Not in mid-epoch, so that a run that was stopped there goes on like one that was not.
            self.learning_rate.observe(score)
        if is_better(score, self.best, kind.higher_is_better):
            self.best = score
            if self.checkpoints.wanted:
                self.checkpoints.save_best(self.state_dict())

    # -- what is left behind -----------------------------------------------------------------------------------

    def _start_record(self) -> Record:
        return {
            "run": self.run.label,
            "event": "start",
            "steps": self.last_step,
            "step": self.position.step,
            "parameters": count_parameters(self.model),
            "examples_per_step": self.examples_per_step,
            "metric": self.data.kind.headline,
            "steps_per_epoch": self.steps_per_epoch,
        }

    def _row(self, recorder: StepRecorder, seconds: float) -> Row:
        stats, training, kind = self.replica.stats(), self.run.training, self.data.kind
        ms = median(recorder.milliseconds)
        return Row(
            run=self.run.label,
            method=self.run.method_name,
            settings=f"{self.run.method!r}, lr={training.lr:g}",
            asked_density=asked_density(self.run.method),
            seed=training.seed,
            density=stats.density,
            metric=kind.headline,
            higher_is_better=kind.higher_is_better,
            score=self.metrics[kind.headline],
            metrics=self.metrics,
            tests=self.tests,
            steps=self.position.step,
            parameters=count_parameters(self.model),
            dense_bytes_per_step=stats.dense_bytes_per_step,
            wire_bytes_per_step=stats.wire_bytes_per_step,
            ratio=stats.ratio,
            ms_per_step=ms,
            exposed_ms_per_step=median(recorder.exposed_milliseconds),
            examples_per_second=None if ms is None else 1000 * self.examples_per_step / ms,
            replicas_identical=are_replicas_identical(self.model, self.workers),
            seconds=seconds,
            simulation=self.replica.costs(),
            layers=describe_layers(self.replica.plan(), stats),
        )

    def state_dict(self) -> State:
        """Everything a run needs to go on bit for bit, on this process.

        No state of random generators: what is random in a step is a function of its number.
        """
        return {
            "version": STATE_VERSION,
            "about": dict(self.run.about),
            "world": self.workers.world,
            "processes": self.workers.processes,
            **vars(self.position),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "carries": self.carries,
            "exchange": self.replica.state_dict(),
            "metrics": self.metrics,
            "tests": self.tests,
            "best": self.best,
        }

    def load_state_dict(self, state: State) -> None:
        if state["version"] != STATE_VERSION:
            raise UsageError(
                f"the checkpoint has version {state['version']!r}; this thinwire reads {STATE_VERSION}"
            )
        self.position = Position(**{name: state[name] for name in vars(self.position)})
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learning_rate.load_state_dict(state["learning_rate"])
        self.precision.scaler.load_state_dict(state["scaler"])
        self.carries = move(state["carries"], self.workers.device)
        self.replica.load_state_dict(state["exchange"])
        self.metrics, self.tests = state["metrics"], state["tests"]
        self.best = state["best"]


def is_better(score: float, best: float | None, higher_is_better: bool) -> bool:
    """Nothing is better than a score that was lost."""
    if math.isnan(score):
        return False
    return best is None or (score > best if higher_is_better else score < best)


def count_steps_per_epoch(examples: Examples, training: Training, world: int) -> int:
    """Optimisation steps of every epoch; micro-batches that do not fill a step are left out."""
    micro_batches = len(
        examples.deal(
            seed=training.seed, epoch=0, rank=0, world=world, batch_size=training.batch_size
        )
    )
    if micro_batches < training.accumulate:
        raise UsageError(
            f"accumulate is {training.accumulate}; an epoch has only {micro_batches} micro-batches of "
            f"{training.batch_size} on {world} workers"
        )
    return micro_batches // training.accumulate


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def asked_density(method: Method) -> float | None:
    """The density a method ends at; None for one without."""
    if isinstance(method, tw.Timeline):
        return asked_density(method.phases[-1][1])
    if isinstance(method, tw.AdamScale):
        return asked_density(method.method)
    if isinstance(method, tw.Compose):
        return getattr(method.select, "density", None)
    return getattr(method, "kept", None) or getattr(method, "density", None)


def are_replicas_identical(model: nn.Module, workers: Workers) -> bool:
    """Collective: whether all processes hold the same bits in all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return len(set(workers.gather(digest.hexdigest()))) == 1


def move(value: Any, device: torch.device) -> Any:
    """The tensors of a nested value, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: move(one, device) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(move(one, device) for one in value)
    return value
