"""Anchors: what torch itself offers, measured beside thinwire's methods so that only ratios need to be quoted.

    no_sync        DDP that never synchronises: the limit
    noop           torch's noop_hook: buckets are filled, nothing is sent
    ddp            DDP as it comes: a dense fp32 all-reduce
    ddp-bf16       torch's bf16 compression hook
    ddp-powersgd   torch's PowerSGD hook

A method of thinwire's registry is attached instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.adapters.ddp import attach
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.methods.base import Method
from thinwire.methods.registry import METHODS, MethodOptions, build_method

POWERSGD_RANK = 4
POWERSGD_START = 2
"""Dense steps before torch's PowerSGD hook compresses; the fewest it allows with error feedback."""


@dataclass(frozen=True)
class Anchor:
    """Something to compare with; `rank` only where it is a low-rank method."""

    name: str
    rank: int | None = None


ANCHORS = ("no_sync", "noop", "ddp", "ddp-bf16", "ddp-powersgd")
RATE_FREE = ("no_sync", "noop")
"""They send nothing, so one measurement serves all rates."""

GLOO_POWERSGD = (
    "torch's PowerSGD hook chains a second collective inside a callback, which crashes or hangs on gloo "
    "with more than one bucket"
)


def is_known(name: str) -> bool:
    return name in ANCHORS or name in METHODS


def build_step_method(name: str, density: float | None, rank: int | None) -> Method | Anchor:
    """The anchor or the registered method of that name, with the settings it takes."""
    if name in ANCHORS:
        return Anchor(name, (rank or POWERSGD_RANK) if name == "ddp-powersgd" else None)
    if name not in METHODS:
        raise UsageError(
            f"method is {name!r}; it must be one of {', '.join(METHODS)} or an anchor "
            f"({', '.join(ANCHORS)})"
        )
    return build_method(name, MethodOptions(density=density, rank=rank))


def install(
    ddp: DistributedDataParallel, method: Method | Anchor, optimizer: Optimizer
) -> Handle | None:
    """Make `ddp` exchange its gradients with the method; a handle where it is one of thinwire's."""
    if isinstance(method, Method):
        return attach(ddp, method, optimizer=optimizer)
    hooks: dict[str, Callable[[], tuple[Any, Any]]] = {
        "noop": lambda: (None, debugging_hooks.noop_hook),
        "ddp-bf16": lambda: (None, _bf16_hook),
        "ddp-powersgd": lambda: _powersgd(method.rank or POWERSGD_RANK),
    }
    if method.name in hooks:
        state, hook = hooks[method.name]()
        ddp.register_comm_hook(state, hook)
    return None


def _bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    # Under its own name DDP refuses it on builds without CUDA, where gloo sums bf16 all the same.
    return default_hooks.bf16_compress_hook(state, bucket)


def _powersgd(rank: int) -> tuple[Any, Any]:
    # It imports numpy, which torch itself does without.
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWERSGD_START,
        )
    return state, powersgd.powerSGD_hook
