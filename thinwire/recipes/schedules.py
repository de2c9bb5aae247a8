"""Learning-rate schedules: warm-up, then one of six shapes. A function of the step, but for plateau, which listens."""

from __future__ import annotations

import math
from typing import Any

from thinwire.recipes.config import Training


class LearningRate:
    """The learning rate of every step of one run."""

    def __init__(
        self, training: Training, *, workers: int, steps_per_epoch: int, higher_is_better: bool
    ) -> None:
        self.training = training
        scale = workers * training.accumulate if training.lr_scaling == "linear" else 1
        self.peak = training.lr * scale
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = training.epochs * steps_per_epoch
        self.warmup_steps = training.warmup_steps or round(training.warmup_epochs * steps_per_epoch)
        self._sign = 1.0 if higher_is_better else -1.0
        self._best = -math.inf
        self._bad_epochs = 0
        self._reductions = 0

    def end_after(self, epochs: int) -> None:
        """Fall over another number of epochs; what is said before the warm-up ends changes no step so far.

        For studies that decide while they run how long they can be.
        """
        self.total_steps = epochs * self.steps_per_epoch

    def at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * self._shape(step)

    def _shape(self, step: int) -> float:
        training, epoch = self.training, step // self.steps_per_epoch
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        match training.schedule:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * progress))
            case "linear":
                return 1 - progress
            case "multistep":
                return training.gamma ** sum(epoch >= mark for mark in training.milestones)
            case "exponential":
                return training.gamma**epoch
            case "plateau":
                return training.gamma**self._reductions
            case _:
                return 1.0

    def observe(self, score: float) -> None:
        """What an epoch's test gave; plateau lowers the rate when `patience` epochs brought nothing better."""
        if self._sign * score > self._best:
            self._best = self._sign * score
            self._bad_epochs = 0
            return
        self._bad_epochs += 1
        if self._bad_epochs > self.training.patience:
            self._reductions += 1
            self._bad_epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "bad_epochs": self._bad_epochs, "reductions": self._reductions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = state["best"]
        self._bad_epochs = state["bad_epochs"]
        self._reductions = state["reductions"]
