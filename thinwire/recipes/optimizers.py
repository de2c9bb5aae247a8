"""Optimizers: the parameter groups and the update rule that a training asks for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from thinwire.errors import UsageError
from thinwire.methods import Method
from thinwire.recipes.config import Training


def build_optimizer(model: nn.Module, training: Training, method: Method) -> Optimizer:
    """Over all parameters of the model; the loop sets the rate before every step."""
    groups = parameter_groups(model, training)
    if training.optimizer == "sgd":
        return SGD(groups, lr=training.lr, momentum=training.momentum, nesterov=training.nesterov)
    kind = Adam if training.optimizer == "adam" else AdamW
    return kind(groups, lr=training.lr, betas=training.betas, eps=training.eps)


def check_takeover(training: Training, method: Method) -> None:
    """Refuse a method that cannot take over from the optimizer."""
    kind, wanted = training.optimizer, method.takes_over
    if wanted == "momentum" and kind != "sgd":
        raise UsageError(
            f"optimizer is {kind!r}, from which momentum correction cannot take over; say adam_scale = {{}} for the method, or "
            'memory = { kind = "Residual" }'
        )
    if wanted == "Adam" and kind == "sgd":
        raise UsageError("optimizer is 'sgd', but adam_scale takes over from Adam; say 'adamw'")
    if wanted == "Adam" and kind == "adam" and training.weight_decay:
        raise UsageError(
            f"weight_decay is {training.weight_decay!r} with optimizer 'adam', which adds it to the gradient; with "
            "adam_scale use 'adamw'"
        )


def parameter_groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """One group, or two if biases and the parameters of norms, all of one dimension, are spared from weight decay."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if training.decay_norms or not training.weight_decay:
        return [{"params": learned, "weight_decay": training.weight_decay}]
    decayed = [parameter for parameter in learned if parameter.dim() > 1]
    spared = [parameter for parameter in learned if parameter.dim() <= 1]
    groups = ((decayed, training.weight_decay), (spared, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
