"""DDP adapter: the communication hook.

No `from __future__ import annotations` here: DDP refuses hooks whose annotations are strings.
"""

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.layout import Bucket, BucketLayout, ParameterInfo, describe_module
from thinwire.methods.base import Method
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

    >>> handle = tw.attach(ddp, tw.ADTopK(density=0.01))
    """
    module = unwrap(ddp)
    socket = _sockets.get(module)
    if socket is None:
        refuse_foreign_hooks(module)
    elif not socket.handle.closed:
        raise UsageError(
            "attach was called twice on this model; use handle.switch(...) to change the method or handle.close() first"
        )
    described = describe_module(module.module)
    parameters = {name: pair[0] for name, pair in described.items()}
    check_parameters(module.module, parameters)
    handle = Handle(
        {name: pair[1] for name, pair in described.items()},
        method,
        device=next(iter(parameters.values())).device,
        policy=policy,
        process_group=process_group or module.process_group,
        grad_scaler=grad_scaler,
        deterministic=deterministic,
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
        module.register_comm_hook(None, self.hook)

    def plug_in(
        self, handle: Handle, described: dict[str, tuple[nn.Parameter, ParameterInfo]]
    ) -> None:
        self.handle = handle
        self._names = {id(parameter): info for parameter, info in described.values()}
        self._layouts.clear()

    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.handle.closed:
            return self._plain_mean(bucket.buffer())
        layout = self._layout(bucket)
        return self.handle.pipeline.reduce(Bucket(layout, bucket.buffer()))

    def _layout(self, bucket: dist.GradBucket) -> BucketLayout:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            slots, offset = [], 0
            for parameter in parameters:
                slots.append(self._names[id(parameter)].slot(offset))
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
    return inner


def refuse_foreign_hooks(module: DistributedDataParallel) -> None:
    if module._comm_hooks:
        raise UsageError(
            "ddp already has a communication hook; DDP takes only one, so wrap the model anew without it"
        )


def check_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse at attach what a hook could not handle later."""
    if not parameters:
        raise UsageError(
            "the model has no parameter that requires a gradient; there is nothing to compress"
        )
    for name, parameter in parameters.items():
        if not parameter.dtype.is_floating_point:
            raise UsageError(
                f"parameter {name!r} has dtype {parameter.dtype}; only float16, bfloat16, float32 and float64 gradients can be sent"
            )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UsageError(
                f"module {name!r} has sparse=True, which gives sparse-layout gradients; only dense ones can be sent, set sparse=False"
            )
