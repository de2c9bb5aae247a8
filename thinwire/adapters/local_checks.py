"""What local steps refuse before anything is exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.adapters.checks import check_parameters
from thinwire.adapters.ddp import unwrap
from thinwire.adapters.local_settings import LocalSettings
from thinwire.errors import UsageError
from thinwire.layout import canonical_name, describe_module
from thinwire.methods.base import Method
from thinwire.plan.policy import check_settings
from thinwire.validate import check_instance


def check_local(model: Any, optimizer: Any, method: Method, settings: LocalSettings) -> None:
    """Refuse what cannot take local steps."""
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    optimizers = listed(optimizer)
    for one in optimizers or [None]:
        check_instance("optimizer", one, Optimizer, "a torch.optim.Optimizer, or several")
    check_settings(method, settings.policy, settings.deterministic)
    if method.takes_over is not None:
        raise UsageError(
            f"method is {type(method).__name__}, which takes momentum over from an optimizer; local steps have an "
            "outer optimizer for that, use a method without momentum"
        )
    if method.adaptive is not None:
        raise UsageError(
            f"method is {type(method).__name__}, which chooses by what an exchange adds to every step; local steps exchange "
            "now and then, so name a method"
        )
    named = {name: pair[0] for name, pair in describe_module(plain_module(model)).items()}
    check_parameters(None, named)
    check_owned(
        "optimizer",
        optimizers,
        named,
        "which the model trains; it must have all of the model's parameters",
    )


def check_owned(
    what: str, optimizers: Iterable[Optimizer], named: Mapping[str, nn.Parameter], why: str
) -> None:
    """Refuse optimizers that leave out a parameter."""
    owned = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [name for name, parameter in named.items() if id(parameter) not in owned]
    if missing:
        raise UsageError(f"{what} does not have {missing[0]!r}, {why}")


def check_trained(model: nn.Module, known: Mapping[str, nn.Parameter]) -> None:
    """Refuse a model that trains other parameters than it did when local steps began."""
    trained = {canonical_name(name) for name, p in model.named_parameters() if p.requires_grad}
    changed = sorted(trained.symmetric_difference(known))
    if changed:
        now, then = ("trained", "was not") if changed[0] in trained else ("not trained", "was")
        raise UsageError(
            f"{changed[0]!r} is {now} now and {then} when local steps began; call finish() and close() before you freeze, "
            "unfreeze or add parameters, and begin again"
        )


def check_apart(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuse DDP over the ranks that local steps exchange with."""
    module = unwrap(model)
    if not isinstance(module, DistributedDataParallel):
        return
    averaged = dist.get_process_group_ranks(module.process_group)
    if len({*averaged} & {*dist.get_process_group_ranks(group)}) > 1:
        raise UsageError(
            "model is a DistributedDataParallel model over ranks that local steps exchange with, so every gradient would still "
            "cross the link; pass the plain model, or DDP over the ranks of one node with process_group and inside_group"
        )


def listed(optimizer: Any) -> list[Any]:
    """The inner optimizers, of which there is mostly one."""
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def plain_module(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile, whose parameters have their own names."""
    module = unwrap(model)
    return unwrap(module.module) if isinstance(module, DistributedDataParallel) else module
