"""Lightning: compression as a callback, whose state is part of the one checkpoint file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters import attach
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.methods import Method
from thinwire.methods.base import check_method

logger = logging.getLogger(__name__)

KEY = "thinwire"
"""Of the states of all ranks in a checkpoint, and before the names of what is logged."""


class Compression(Callback):
    """Compresses the gradients of every `fit`.

    Checkpoints hold what all ranks hold back: the first rank collects it, so it needs room for that. Logs get
    `thinwire/ratio` and others. With one process nothing happens. A second `fit` begins with nothing held back, as it begins
    with a new optimizer.

    Args:
        method: How gradients are sent: tw.Auto(), which measures and chooses, or one by name such as tw.ADTopK(density=0.01).
        on_world_change: If a checkpoint was saved by another number of processes: "mean" or "reset".
        settings: What `tw.attach` takes besides; GradScaler and optimizer are found by themselves.

    >>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[Compression(tw.ADTopK(density=0.01))])
    """

    def __init__(
        self, method: Method, *, on_world_change: str | None = None, **settings: Any
    ) -> None:
        check_method(method)
        self.method = method
        self.handle: Handle | None = None
        """There from the start of `fit` until the next one starts."""
        self._on_world_change = on_world_change
        self._settings = settings
        self._saved: list[Mapping[str, Any]] | None = None
        self._resumes = False

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called before the model is wrapped, so what is found waits for `on_train_start`; also when nothing is trained."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._saved = checkpoint.get(KEY)
            self._resumes = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None
        if trainer.world_size == 1:
            return
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"strategy is {type(trainer.strategy).__name__}; Compression needs one that wraps the model in "
                "DistributedDataParallel, such as 'ddp'"
            )
        settings = {
            "grad_scaler": getattr(trainer.precision_plugin, "scaler", None),
            **self._settings,
        }
        if self.method.takes_over is not None or len(trainer.optimizers) == 1:
            settings.setdefault("optimizer", the_optimizer(trainer))
        self.handle = attach(model, self.method, **settings)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved, self._saved = self._saved, None
        resumes, self._resumes = self._resumes, False
        if self.handle is None or not resumes:
            return
        if saved is None:
            logger.warning(
                "the checkpoint has nothing of thinwire; nothing is restored of what was held back, so the run differs from one "
                "that was never interrupted"
            )
            return
        if saved:
            self.handle.load_state_dict(saved, on_world_change=self._on_world_change)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called on every rank and written by the first, which has to collect."""
        if self.handle is None or self.handle.closed:
            # As inside Lightning's own search for a learning rate, which comes before `on_fit_start`: nothing is held back.
            checkpoint[KEY] = []
            return
        states: list[Any] | None = [None] * self.handle.world if self.handle.rank == 0 else None
        dist.gather_object(on_cpu(self.handle.state_dict()), states, dst=0)
        if states is not None:
            checkpoint[KEY] = states

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # As Lightning's own monitors ask.
        if self.handle is not None and trainer._logger_connector.should_update_logs:
            values = self.handle.stats().as_dict()
            pl_module.log_dict({f"{KEY}/{key}": float(value) for key, value in values.items()})


def the_optimizer(trainer: Trainer) -> Any:
    """The one whose momentum is taken over."""
    if len(trainer.optimizers) != 1:
        raise UsageError(
            f"there are {len(trainer.optimizers)} optimizers; a method that takes momentum over needs one"
        )
    return trainer.optimizers[0]


def on_cpu(state: Any) -> Any:
    """The same state where every process can read it."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    return state
