"""DDP adapter: the communication hook.

No `from __future__ import annotations` here: DDP refuses hooks whose annotations are strings.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.checks import check_parameters
from thinwire.errors import UsageError
from thinwire.exchange.drivers import fail
from thinwire.handle import Handle, check_settings
from thinwire.layout import Bucket, BucketLayout, ParameterInfo, describe_module
from thinwire.methods.base import Method
from thinwire.opaque import opaque
from thinwire.optim import take_over
from thinwire.plan.policy import Rule

logger = logging.getLogger(__name__)


def attach(
    ddp: nn.Module,
    method: Method,
    *,
    policy: Sequence[Rule] | None = None,
    process_group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: Any = None,
    deterministic: bool = False,
) -> Handle:
    """Compress the gradients of a DistributedDataParallel model from its next backward on.

    Collective: every rank calls it with the same settings, before or after any step. `optimizer` is needed only by
    methods that take momentum over; `grad_scaler` keeps memory in unscaled units; `deterministic` sums dense parts
    in rank order, so that resuming is bit-exact whatever the bucketing.

    Accumulate under `ddp.no_sync()`: two synchronising backwards without `zero_grad` between them would compress an
    averaged gradient a second time. On the CPU the first steps are watched for that; on CUDA looking would make the
    host wait, so it is not noticed there.

    >>> handle = tw.attach(ddp, tw.ADTopK(density=0.01))
    """
    module = unwrap(ddp)
    check_settings(method, policy, deterministic)
    socket = _sockets.get(module)
    if socket is None:
        refuse_foreign_hooks(module)
    elif not socket.handle.closed:
        raise UsageError(
            "attach was called twice on this model; use handle.switch(...) to change the method or handle.close() first"
        )
    reduced = {id(parameter) for parameter in module._module_parameters}
    described = {
        name: pair
        for name, pair in describe_module(module.module).items()
        if id(pair[0]) in reduced
    }
    parameters = {name: pair[0] for name, pair in described.items()}
    check_parameters(module.module, parameters)
    handle = Handle(
        {name: pair[1] for name, pair in described.items()},
        method,
        device=next(iter(parameters.values())).device,
        policy=policy,
        process_group=check_group(process_group, module.process_group),
        grad_scaler=grad_scaler,
        deterministic=deterministic,
        takeover=take_over(method, optimizer, parameters),
    )
    if socket is None:
        socket = _sockets[module] = Socket(module)
    socket.plug_in(handle, described)
    return handle


class Socket:
    """The one hook DDP lets us register, ever; handles come and go behind it."""

    def __init__(self, module: DistributedDataParallel) -> None:
        # Not the module itself: the registry of sockets must not keep it alive.
        self.process_group = module.process_group
        self.handle: Handle
        self._names: dict[int, ParameterInfo] = {}
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self._watch: LeftoverWatch | None = None
        module.register_comm_hook(None, self.hook)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """DDP copies and pickles its list of hooks, but not their effect: a copy stands for no hook at all."""
        return LostSocket, ()

    def plug_in(
        self, handle: Handle, described: dict[str, tuple[nn.Parameter, ParameterInfo]]
    ) -> None:
        self.handle = handle
        self._names = {id(parameter): info for parameter, info in described.values()}
        self._layouts.clear()
        self._watch = LeftoverWatch([parameter for parameter, _ in described.values()], handle)

    @opaque
    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.handle.closed:
            return self._plain_mean(bucket.buffer())
        try:
            layout = self._layout(bucket)
        except Exception as error:
            # Raised here it would leave DDP's reducer unusable; through the future it ends backward().
            failed: Future[Tensor] = Future()
            fail(failed, error)
            if bucket.is_last():
                # DDP waits for the other buckets first.
                self.handle.pipeline.leave()
            return failed
        if self._watch is not None and self._watch.exchange_begins():
            self._watch = None
        return self.handle.pipeline.reduce(Bucket(layout, bucket.buffer()), last=bucket.is_last())

    def _layout(self, bucket: dist.GradBucket) -> BucketLayout:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            slots, offset = [], 0
            for parameter in parameters:
                if id(parameter) in self._names:
                    slots.append(self._names[id(parameter)].slot(offset))
                elif parameter.requires_grad:
                    raise UsageError(
                        f"a parameter of shape {list(parameter.shape)} was frozen when attach was called and is not now; "
                        "close the handle and attach again after unfreezing"
                    )
                offset += parameter.numel()
            flat = bucket.buffer()
            layout = self._layouts[key] = BucketLayout(
                tuple(slots), flat.numel(), flat.dtype, flat.device
            )
        return layout

    def _plain_mean(self, flat: Tensor) -> Future[Tensor]:
        flat.div_(dist.get_world_size(self.process_group))
        work = dist.all_reduce(flat, group=self.process_group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: flat)


class LostSocket:
    """What a socket becomes in a copy of its model."""

    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        raise UsageError("this model is a copy, whose hook DDP has dropped; attach to it again")


class LeftoverWatch:
    """Warns once if an averaged gradient is still there when the next one is accumulated onto it.

    Looks at one small parameter right before each accumulation, on the CPU, for a handle's first steps.
    """

    STEPS = 10

    def __init__(self, parameters: Sequence[nn.Parameter], handle: Handle) -> None:
        self._steps = 0
        self._averaged = False
        self._leftover = False
        self._remover: Any = None
        watched = [p for p in parameters if p.numel() and p.device.type == "cpu"]
        if watched:
            smallest = min(watched, key=lambda p: p.numel())
            reference = weakref.ref(smallest)
            self._remover = smallest.register_hook(lambda _: self._look(reference()))
            handle.on_close(self._remover.remove)

    @opaque
    def _look(self, parameter: nn.Parameter | None) -> None:
        if self._averaged and parameter is not None and parameter.grad is not None:
            self._leftover = bool(parameter.grad.any())
        self._averaged = False

    def exchange_begins(self) -> bool:
        """True when there is nothing more to watch for."""
        if self._leftover:
            logger.warning(
                "a synchronising backward ran without zero_grad after the last one, so an averaged gradient is compressed "
                "a second time; accumulate under no_sync() and synchronise once"
            )
        self._steps += not self._averaged
        self._averaged = True
        finished = self._leftover or self._steps > self.STEPS
        if finished and self._remover is not None:
            self._remover.remove()
        return finished


_sockets: WeakKeyDictionary[DistributedDataParallel, Socket] = WeakKeyDictionary()


def unwrap(model: nn.Module) -> DistributedDataParallel:
    """The DDP module itself, out of torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        raise UsageError(
            f"ddp is a {type(inner).__name__}; it must be a torch.nn.parallel.DistributedDataParallel model"
        )
    if getattr(inner, "_use_python_reducer", False):
        raise UsageError(
            "ddp uses the Python reducer (torch._dynamo.config.optimize_ddp = 'python_reducer'), which has no bucket hook; "
            "set optimize_ddp to 'ddp_optimizer' or False before wrapping the model"
        )
    if getattr(inner, "skip_all_reduce_unused_params", False):
        raise UsageError(
            "ddp has skip_all_reduce_unused_params=True, which hides from a hook where a step ends; it must be False"
        )
    return inner


def refuse_foreign_hooks(module: DistributedDataParallel) -> None:
    lost = [pair for pair in module._comm_hooks if is_lost(pair[0])]
    module._comm_hooks = [pair for pair in module._comm_hooks if pair not in lost]
    if module._comm_hooks:
        raise UsageError(
            "ddp already has a communication hook; DDP takes only one, so wrap the model anew without it"
        )


def is_lost(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), LostSocket)


def check_group(asked: dist.ProcessGroup | None, own: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group to exchange on: DDP's own or another one over the same ranks."""
    if asked is None:
        return own
    ranks, own_ranks = map(dist.get_process_group_ranks, (asked, own))
    if ranks != own_ranks:
        raise UsageError(
            f"process_group has the ranks {ranks}; it must have those of the model's own group, {own_ranks}"
        )
    return asked
