"""Optimizers: the parameter groups and the update rule that a training asks for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from thinwire.errors import UsageError
from thinwire.frozen_adam import FrozenAdam
from thinwire.methods.base import Dense, Method
from thinwire.recipes.config import Training


def build_optimizer(model: nn.Module, training: Training, method: Method) -> Optimizer:
    """Over all parameters of the model; the loop sets the rate before every step."""
    groups = parameter_groups(model, training)
    if training.optimizer == "sgd":
        return SGD(groups, lr=training.lr, momentum=training.momentum, nesterov=training.nesterov)
    if method.owns_momentum:
        check_frozen_adam(training, method)
        return FrozenAdam(
            groups,
            lr=training.lr,
            dense_steps=count_dense_steps(method),
            betas=training.betas,
            eps=training.eps,
        )
    kind = Adam if training.optimizer == "adam" else AdamW
    return kind(groups, lr=training.lr, betas=training.betas, eps=training.eps)


def check_frozen_adam(training: Training, method: Method) -> None:
    """Refuse what cannot take the place of Adam under a method that owns momentum."""
    if not count_dense_steps(method):
        raise UsageError(
            f"optimizer is {training.optimizer!r}, whose second moment has to be learned before a method with momentum "
            'correction compresses; say dense_epochs = 2, or memory = { kind = "Residual" }, for the method'
        )
    if training.optimizer == "adam" and training.weight_decay:
        raise UsageError(
            f"weight_decay is {training.weight_decay!r} with optimizer 'adam', which adds it to the gradient; with momentum "
            "correction use 'adamw'"
        )


def count_dense_steps(method: Method) -> int:
    """With which a method begins."""
    later = (turn for turn in method.turns if not isinstance(method.at(turn), Dense))
    return next(later, 0)


def parameter_groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """One group, or two if biases and the parameters of norms, all of one dimension, are spared from weight decay."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if training.decay_norms or not training.weight_decay:
        return [{"params": learned, "weight_decay": training.weight_decay}]
    decayed = [parameter for parameter in learned if parameter.dim() > 1]
    spared = [parameter for parameter in learned if parameter.dim() <= 1]
    groups = ((decayed, training.weight_decay), (spared, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
