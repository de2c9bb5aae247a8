"""Transformers: compression under the Trainer, whose checkpoints and logs have what belongs to it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from thinwire.adapters import attach
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.integrations.files import load_rank, save_rank
from thinwire.methods import Method
from thinwire.methods.base import check_method
from thinwire.validate import check_instance


def compress(
    trainer: Trainer, method: Method, *, on_world_change: str | None = None, **settings: Any
) -> CompressionCallback:
    """Compress the gradients of a Trainer, from its next `train()` on.

    Its checkpoints get one more file per rank, `thinwire_{rank}.pt`; `train(resume_from_checkpoint=...)` reads it. Its logs
    get `thinwire/ratio` and others. With one process nothing happens.

    Args:
        trainer: Before `train()` is called.
        method: How gradients are sent: tw.Auto(), which measures and chooses, or one by name such as tw.ADTopK(density=0.01).
        on_world_change: If a checkpoint was saved by another number of processes: "mean" or "reset".
        settings: What `tw.attach` takes besides; GradScaler and optimizer are found by themselves.

    Returns:
        The callback; `callback.handle` is there once training has begun.

    >>> compress(trainer, tw.ADTopK(density=0.01))
    >>> trainer.train()
    """
    check_instance("trainer", trainer, Trainer, "a transformers.Trainer")
    check_method(method)
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(one, CompressionCallback) for one in callbacks):
        raise UsageError(
            "compress was called twice on this trainer; use callback.handle.switch(...) to change the method"
        )
    callback = CompressionCallback(trainer, method, on_world_change, settings)
    # Before the loggers, which then see what it adds.
    callbacks.insert(0, callback)
    return callback


class CompressionCallback(TrainerCallback):
    """Attaches when training begins; saves, loads and logs with the Trainer. `compress` makes it."""

    def __init__(
        self,
        trainer: Trainer,
        method: Method,
        on_world_change: str | None,
        settings: dict[str, Any],
    ) -> None:
        self.handle: Handle | None = None
        self.method = method
        self._settings = settings
        self._on_world_change = on_world_change
        self._trainer = weakref.ref(trainer)
        self._owners: tuple[weakref.ref[Any], ...] = ()
        """The wrapped model and the optimizer that the handle belongs to."""
        self._resumed_from: str | None = None
        self._learn_where_to_resume(trainer)

    def _learn_where_to_resume(self, trainer: Trainer) -> None:
        """No callback is told, so the Trainer's own loading is listened to."""
        load = trainer._load_optimizer_and_scheduler

        def remember(checkpoint: str | None) -> None:
            self._resumed_from = checkpoint
            load(checkpoint)

        vars(trainer)["_load_optimizer_and_scheduler"] = remember

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # The callback is given the bare model; the Trainer has the wrapped one.
        trainer = self._trainer()
        assert trainer is not None
        resumed_from, self._resumed_from = self._resumed_from, None
        if args.world_size == 1:
            return
        # Accelerate wraps the optimizers it prepares.
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        owners = tuple(map(weakref.ref, (trainer.model_wrapped, optimizer)))
        handle = self.handle
        if handle is None or handle.closed or self._owners != owners:
            handle = self.handle = self._attach(trainer, optimizer)
            self._owners = owners
        if resumed_from is not None:
            load_rank(handle, resumed_from, on_world_change=self._on_world_change)

    def _attach(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> Handle:
        if self.handle is not None:
            self.handle.close()
        found = {"grad_scaler": trainer.accelerator.scaler, "optimizer": optimizer}
        return attach(trainer.model_wrapped, self.method, **{**found, **self._settings})

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # Whoever searches for hyper-parameters or keeps models alone does not resume.
        if args.save_only_model or state.is_hyper_param_search:
            return
        if self.handle is None or self.handle.closed:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        save_rank(self.handle, folder)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        if self.handle is None or logs is None or "loss" not in logs:
            return
        values = self.handle.stats().as_dict()
        for target in (logs, state.log_history[-1]):
            target.update({f"thinwire/{key}": value for key, value in values.items()})
