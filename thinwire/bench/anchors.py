"""Anchors: what torch itself offers, measured beside thinwire's methods so that only ratios need to be quoted.

    no_sync        DDP that never synchronises: the limit
    noop           torch's noop_hook: buckets are filled, nothing is sent
    ddp            DDP as it comes: a dense fp32 all-reduce
    ddp-bf16       torch's bf16 compression hook
    ddp-powersgd   torch's PowerSGD hook

Methods of thinwire are attached instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw
from thinwire.bench.local_methods import LOCAL_METHODS, LocalMethod
from thinwire.methods import Method
from thinwire.tools.methods import METHODS, build_method, keep_taken
from thinwire.tools.settings.names import check_name

USUAL_EVERY = 32
POWERSGD_RANK = 4
POWERSGD_START = 2
"""Dense steps before torch's PowerSGD hook compresses; the fewest it allows with error feedback."""


@dataclass(frozen=True)
class Anchor:
    """Something to compare with; `rank` only where it is a low-rank method."""

    name: str
    rank: int | None = None


ANCHORS = ("no_sync", "noop", "ddp", "ddp-bf16", "ddp-powersgd")
HSDP_ANCHORS = ("no_sync", "hsdp")
"""Of models that are sharded inside a host and copied between hosts: without traffic between hosts, and plain."""
GLOO_ANCHORS = tuple(name for name in ANCHORS if name != "ddp-powersgd")
"""What is measured on gloo unless asked otherwise; torch's PowerSGD hook breaks off there, see below."""
RATE_FREE = ("no_sync", "noop")
"""They send nothing, so one measurement serves all rates."""

GLOO_POWERSGD = (
    "torch's PowerSGD hook chains a second collective inside a callback, which crashes or hangs on gloo "
    "with more than one bucket"
)


def build_step_method(
    name: str, density: float | None, rank: int | None, every: int | None = None
) -> Method | Anchor | LocalMethod:
    """The anchor, the preset of local steps or the registered method of that name, with the settings it takes."""
    if name in LOCAL_METHODS:
        return LocalMethod(name, every or USUAL_EVERY)
    if name in (*ANCHORS, *HSDP_ANCHORS):
        return Anchor(name, (rank or POWERSGD_RANK) if name == "ddp-powersgd" else None)
    if ":" not in name:
        anchors, local = ", ".join(ANCHORS), ", ".join(LOCAL_METHODS)
        or_else = f", an anchor ({anchors}), local steps ({local}) or your own as module:attribute"
        check_name("method", name, METHODS, or_else)
    return build_method(name, keep_taken(name, density=density, rank=rank))


def install(model: nn.Module, method: Method | Anchor, optimizer: Optimizer) -> tw.Handle | None:
    """Make a wrapped model exchange its gradients with the method; a handle where it is one of thinwire's."""
    if isinstance(method, Method):
        return tw.attach(model, method, optimizer=optimizer)
    hooks: dict[str, Callable[[], tuple[Any, Any]]] = {
        "noop": lambda: (None, debugging_hooks.noop_hook),
        "ddp-bf16": lambda: (None, _bf16_hook),
        "ddp-powersgd": lambda: _powersgd(method.rank or POWERSGD_RANK),
    }
    if method.name in hooks:
        state, hook = hooks[method.name]()
        assert isinstance(model, DistributedDataParallel), "hooks are DDP's"
        model.register_comm_hook(state, hook)
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
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START
        )
    return state, powersgd.powerSGD_hook
