"""The one door for models that are wrapped already: `attach`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import attach_ddp, unwrap
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.methods.auto import Auto
from thinwire.methods.base import Method
from thinwire.plan.policy import Rule, check_settings


def attach(
    model: nn.Module,
    method: Method = Auto(),  # noqa: B008 (settings, which nobody changes)
    *,
    policy: Sequence[Rule] | None = None,
    process_group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: Any = None,
    deterministic: bool = False,
    skippable: bool = False,
    skipped: str = "forget",
    checksum: bool = False,
    watch: int | None = None,
    on_difference: str = "raise",
) -> Handle:
    """Compress the gradients of a DistributedDataParallel or FSDP2 model from its next backward on.

    Every rank calls it with the same settings, before or after any step.

    Args:
        model: The model, wrapped in DistributedDataParallel, or sharded by `fully_shard` over a 2-D mesh or copied by
            `replicate`, and perhaps wrapped in torch.compile. Between shards nothing is compressed.
        method: How gradients are sent: tw.Auto(), which measures and chooses, or one by name such as tw.ADTopK(density=0.01).
        policy: Rules for single parameters, such as [tw.rule("*.wte.*", axis=0)]; the first match wins.
        process_group: A group over the same ranks to exchange on; the model's own unless given. For `fully_shard` over a
            1-D mesh, the ranks that hold the same shard.
        optimizer: Tells tw.Auto() what is safe: without it Auto stays dense. Methods that take momentum over, such as tw.DGC,
            and on_difference="repair" need it too.
        grad_scaler: The GradScaler of the loss, if there is one; what is held back is then stored without the loss scale.
        deterministic: Add dense parts in rank order, so that resuming is bit-exact whatever the bucketing.
        skippable: You may call `handle.discard_step()`: a step that is not applied then leaves no trace in what is held
            back. That takes 4 bytes more per compressed parameter; with a `grad_scaler` it is always on.
        skipped: What a skipped step leaves: with "forget" nothing. With "keep" what it sent is held back again, with the
            finite part of its gradient, and no extra bytes are needed.
        checksum: Check every message, and refuse a damaged one on all ranks in the same step: `backward()` raises a
            `DamageError`, and training can go on. Every collective is followed by a small one, for which the host waits on
            CUDA too. Not for sharded models.
        watch: Compare the replicas every so many steps, by a fingerprint of the parameters and of the last update. None for
            never; not for sharded models.
        on_difference: What is done about replicas that differ: "raise", or "repair" to copy parameters and the optimizer's state
            from the majority. Without a majority, or without an `optimizer`, it raises.

    Returns:
        The handle: what is sent, what happens to every parameter, state, switching, closing.

    Accumulate under `ddp.no_sync()`: two synchronising backwards without `zero_grad` between them would compress an
    averaged gradient a second time. On the CPU the first steps are watched for that; on CUDA looking would make the
    host wait, so it is not noticed there.

    A gradient that is not finite turns its whole bucket into not-a-number on all ranks, so that a GradScaler skips the step
    everywhere. Without one the script has to skip it: plain DDP would spoil single elements only.

    >>> handle = tw.attach(ddp, tw.ADTopK(density=0.01))
    """
    module = unwrap(model)
    check_settings(method, policy, deterministic)
    options: dict[str, Any] = {
        "policy": policy,
        "process_group": process_group,
        "optimizer": optimizer,
        "grad_scaler": grad_scaler,
        "deterministic": deterministic,
        "skippable": skippable,
        "skipped": skipped,
        "checksum": checksum,
        "watch": watch,
        "on_difference": on_difference,
    }
    if isinstance(module, DistributedDataParallel):
        return attach_ddp(module, method, **options)
    # Here, because importing FSDP takes its time and most scripts do without.
    from torch.distributed.fsdp import FSDPModule

    from thinwire.adapters.fsdp import attach_fsdp

    if isinstance(module, FSDPModule):
        return attach_fsdp(module, method, **options)
    raise UsageError(
        f"model is a {type(module).__name__}; it must be a torch.nn.parallel.DistributedDataParallel model, or one to which "
        "fully_shard was applied"
    )
