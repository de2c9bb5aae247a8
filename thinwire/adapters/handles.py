"""make_handle: how adapters come to a handle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from thinwire.auto import Prospect
from thinwire.auto.pilot import ONLY_DENSE
from thinwire.auto.steering import bind
from thinwire.engine import checkpoint
from thinwire.engine.bucket_plan import BadDelivery
from thinwire.engine.coalescer import COALESCE_BYTES
from thinwire.engine.device_drivers import make_on
from thinwire.engine.drivers import Driver
from thinwire.engine.loss_scale import scale_reader
from thinwire.engine.reducer import Reducer
from thinwire.engine.replicas import ReplicaWatch
from thinwire.handle import Handle
from thinwire.kernels.inspection import prepare_poison
from thinwire.layout import BucketLayout, ParameterInfo
from thinwire.methods.base import Method
from thinwire.optim.base import Takeover
from thinwire.plan.planner import FAR
from thinwire.plan.policy import Rule, check_settings, make_plan
from thinwire.validate import check_bool, check_choice

logger = logging.getLogger(__name__)


def make_handle(
    parameters: Mapping[str, ParameterInfo],
    method: Method,
    connect: Callable[[], Driver],
    *,
    device: torch.device,
    policy: Sequence[Rule] | None = None,
    grad_scaler: Any = None,
    deterministic: bool = False,
    checksum: bool = False,
    skippable: bool = False,
    skipped: str = "forget",
    takeover: Takeover | None = None,
    prospect: Prospect | None = None,
    coalesce_bytes: int = COALESCE_BYTES,
    replicas: ReplicaWatch | None = None,
    when_bad: Callable[[BucketLayout], BadDelivery] = prepare_poison,
    settings: Mapping[str, str] | None = None,
    form: checkpoint.WholeTensors = checkpoint.WHOLE,
) -> Handle:
    """A handle on a reducer of its own, as the adapters make it. What one rank alone can see is checked before it connects."""
    check_settings(method, policy, deterministic)
    check_skipping(checksum, skippable, skipped)
    bound, rules = bind(method, policy or [], takeover)
    scale = scale_reader(grad_scaler)
    scaled = grad_scaler is not None and grad_scaler.is_enabled()
    skips = skippable or scaled
    if replicas is not None and takeover is not None:
        replicas.followers.append(takeover)
    build = partial(
        Reducer,
        parameters,
        device=device,
        scale=scale,
        deterministic=deterministic,
        checksum=checksum,
        restorable=skips and skipped == "forget",
        coalesce_bytes=coalesce_bytes,
        replicas=replicas,
        when_bad=when_bad,
        settings={"grad_scaler": "enabled" if scaled else "none", **(settings or {})},
    )
    reducer = make_on(connect(), lambda driver: build(bound, driver, policy=rules))
    return Handle(
        reducer,
        method,
        policy or [],
        takeover,
        skips=skips or skipped == "keep",
        form=form,
        build=build,
        prospect=prospect,
    )


def warn_if_vain(handle: Handle) -> None:
    """Say once where compressing cannot help: among one worker, or where every parameter goes dense in the end."""
    method, rules = handle.steering.settings()
    infos = handle.reducer.parameters.values()
    pilot = handle.steering.pilot
    if handle.rank == 0 and pilot is not None and pilot.idle:
        logger.warning(ONLY_DENSE)
    if handle.rank or pilot is not None or method.is_dense:
        return
    plan = make_plan(infos, method, rules, handle.world, FAR, quiet=True).values()
    name = type(method).__name__
    if all(one.dense for one in plan):
        largest = max(plan, key=lambda one: one.info.numel)
        logger.warning(
            "%s compresses none of the %d parameters (%s: %s); all gradients go dense",
            name,
            len(plan),
            largest.info.name,
            largest.reason,
        )
    elif handle.world == 1:
        logger.warning(
            "there is one worker: nothing is sent, and what %s leaves out or rounds is lost time; use tw.Dense() here",
            name,
        )


def check_skipping(checksum: Any, skippable: Any, skipped: Any) -> None:
    check_bool("checksum", checksum)
    check_bool("skippable", skippable)
    check_choice("skipped", skipped, ("forget", "keep"))
