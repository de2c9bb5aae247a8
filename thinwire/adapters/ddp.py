"""DDP adapter: the communication hook.

No `from __future__ import annotations` here: DDP refuses hooks whose annotations are strings.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.checks import check_optimizer, check_parameters, has_own_collectives
from thinwire.adapters.handles import make_handle, warn_if_vain
from thinwire.adapters.plain import plain_mean
from thinwire.auto import Prospect
from thinwire.engine.device_drivers import make_driver
from thinwire.engine.drivers import fail
from thinwire.engine.opaque import in_compiled_backward, opaque
from thinwire.engine.replicas import ReplicaWatch
from thinwire.engine.watching import look_at_replicas
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.layout import Bucket, BucketLayout, ParameterInfo, describe_module
from thinwire.methods.base import Method
from thinwire.observe.stations import HOOK, station
from thinwire.optim.takeover import take_over

logger = logging.getLogger(__name__)


def attach_ddp(
    module: DistributedDataParallel,
    method: Method,
    *,
    process_group: dist.ProcessGroup | None,
    optimizer: torch.optim.Optimizer | None,
    watch: int | None,
    on_difference: str,
    **options: Any,
) -> Handle:
    """Compress the gradients of a DistributedDataParallel model; `options` are those of `make_handle`."""
    refuse_unhookable(module)
    hook = _hooks.get(module)
    if hook is None:
        refuse_foreign_hooks(module)
    elif not hook.handle.closed:
        raise UsageError(
            "attach was called twice on this model; use handle.switch(...) to change the method or handle.close() first"
        )
    described = describe_reduced(module)
    parameters = {name: pair[0] for name, pair in described.items()}
    check_parameters(module.module, parameters)
    check_optimizer(optimizer, parameters)
    takeover = take_over(method, optimizer, parameters)
    device = next(iter(parameters.values())).device
    group = check_group(process_group, module.process_group)
    handle = make_handle(
        {name: pair[1] for name, pair in described.items()},
        method,
        partial(make_driver, group, device, in_turn=has_own_collectives(module)),
        device=device,
        takeover=takeover,
        replicas=ReplicaWatch(parameters, watch, on_difference, optimizer),
        prospect=Prospect(optimizer, parameters),
        **options,
    )
    if takeover is not None:
        takeover.commit([handle])
    if hook is None:
        hook = _hooks[module] = DdpHook(module)
    hook.connect(handle, described)
    handle.movable(partial(move_to_model, handle))
    warn_if_vain(handle)
    return handle


def describe_reduced(
    module: DistributedDataParallel,
) -> dict[str, tuple[nn.Parameter, ParameterInfo]]:
    """The parameters whose gradients DDP reduces, by name."""
    reduced = {id(parameter) for parameter in module._module_parameters}
    return {
        name: pair
        for name, pair in describe_module(module.module).items()
        if id(pair[0]) in reduced
    }


def move_to_model(
    handle: Handle, process_group: dist.ProcessGroup | None, model: nn.Module | None
) -> dist.ProcessGroup:
    """Put a handle on a model that was wrapped anew; the group it is moved to."""
    module = None if model is None else unwrap(model)
    if not isinstance(module, DistributedDataParallel) or module in _hooks:
        raise UsageError(
            "DDP cannot change its process group; wrap the model anew with DistributedDataParallel(..., process_group=new) "
            "and call handle.regroup(model=ddp)"
        )
    refuse_unhookable(module)
    refuse_foreign_hooks(module)
    described = describe_reduced(module)
    known = {name: info for name, (_, info) in described.items()}
    if known != handle.reducer.parameters:
        raise UsageError("model has other parameters than the one that the handle was attached to")
    hook = _hooks[module] = DdpHook(module)
    hook.connect(handle, described)
    return check_group(process_group, module.process_group)


class DdpHook:
    """The one hook DDP lets us register, ever; handles come and go behind it."""

    def __init__(self, module: DistributedDataParallel) -> None:
        # Not the module itself: the registry of hooks must not keep it alive.
        self.process_group = module.process_group
        self.handle: Handle
        self._names: dict[int, ParameterInfo] = {}
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self._watch: LeftoverWatch | None = None
        self._task = -1
        """Autograd's number of the backward that is running, or was the last one."""
        self._error: Exception | None = None
        self._complete = False
        """Whether the last bucket of this backward has come."""
        tensors = int(module._get_ddp_logging_data()["num_parameter_tensors"])
        self._unnumbered = tensors if module.static_graph else 0
        """How many gradients come in the first backward of a static graph, in which DDP gives every bucket the number 0."""
        self._came = 0
        """How many of them have come."""
        module.register_comm_hook(None, self.hook)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """DDP copies and pickles its list of hooks, but not their effect: a copy stands for no hook at all."""
        return StaleHook, ()

    def connect(
        self, handle: Handle, described: dict[str, tuple[nn.Parameter, ParameterInfo]]
    ) -> None:
        self.handle = handle
        self._names = {id(parameter): info for parameter, info in described.values()}
        self._layouts.clear()
        self._watch = LeftoverWatch([parameter for parameter, _ in described.values()], handle)

    @opaque
    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        with station(HOOK):
            return self._hook(bucket)

    def _hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.handle.closed:
            return plain_mean(bucket.buffer(), self.process_group)
        future = self._promise(bucket.buffer())
        last = self._is_last(bucket)
        try:
            layout = self._layout(bucket)
        except Exception as error:
            # Raised here it would leave DDP's reducer unusable; through the future it ends backward().
            fail(future, error)
        else:
            if self._watch is not None and last and self._watch.backward_ends():
                self._watch = None
            self.handle.reducer.reduce(Bucket(layout, bucket.buffer()), future)
        if last:
            self.handle.reducer.flush()
            self._complete = True
            if ends_unheard():
                self._end_step()
        return future

    def _promise(self, flat: Tensor) -> Future[Tensor]:
        """The future that DDP waits for."""
        task = torch._C._current_graph_task_id()
        if ends_unheard():
            # Nothing comes between us and who waits.
            self._stand_aside(joined=task == -1)
            return self.handle.reducer.driver.new_future()
        if task != self._task:
            self._task, self._complete, self._came = task, False, 0
            Variable._execution_engine.queue_callback(self._end_backward)
        return HookFuture(flat, self._keep_error)

    def _is_last(self, bucket: dist.GradBucket) -> bool:
        """Whether this is the last bucket of its backward."""
        if not self._unnumbered:
            return bucket.is_last()
        self._came += len(bucket.parameters())
        if self._came < self._unnumbered:
            return False
        self._unnumbered = 0
        return True

    def _stand_aside(self, *, joined: bool) -> None:
        """A rank that has joined does not step, so that its parameters are not those of the others for a while."""
        replicas = self.handle.reducer.replicas
        if joined and replicas is not None:
            replicas.aside = True

    def _keep_error(self, error: Exception) -> None:
        self._error = self._error or error

    def _end_backward(self) -> None:
        """DDP's own end is behind this one, and would not come if an error were raised now."""
        Variable._execution_engine.queue_callback(self._raise_error)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._complete = False
            raise error
        if self._complete and not self.handle.closed:
            self._end_step()
            look_at_replicas(self.handle.reducer)

    def _end_step(self) -> None:
        """All buckets have come, and the backward that they came from has ended."""
        self._complete = False
        self.handle.reducer.end_backward()

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


def ends_unheard() -> bool:
    """Whether nobody is told when this backward ends: under `join()` there is none, and compiled autograd drops what is asked
    for at the end."""
    return torch._C._current_graph_task_id() == -1 or in_compiled_backward()


class HookFuture(Future[Tensor]):
    """What DDP waits for. It takes an error for a result that it cannot cast, so it is given not-a-number instead."""

    def __init__(self, flat: Tensor, on_error: Callable[[Exception], None]) -> None:
        super().__init__(devices=[flat.device] if flat.is_cuda else None)
        self._flat = flat
        self._on_error = on_error

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]
        self._on_error(result)
        self.set_result(self._flat.fill_(torch.nan))


class StaleHook:
    """What a hook becomes in a copy of its model."""

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

    def backward_ends(self) -> bool:
        """The last bucket of a synchronising backward has come; True when there is nothing more to watch for."""
        if self._leftover:
            logger.warning(
                "a synchronising backward ran without zero_grad after the last one, so an averaged gradient is compressed "
                "a second time; accumulate under no_sync() and synchronise once"
            )
        self._steps += 1
        self._averaged = True
        finished = self._leftover or self._steps > self.STEPS
        if finished and self._remover is not None:
            self._remover.remove()
        return finished


_hooks: WeakKeyDictionary[DistributedDataParallel, DdpHook] = WeakKeyDictionary()


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, out of torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise UsageError(
            f"model is of class {type(inner).__name__}; it must be a model in torch.nn.parallel.DistributedDataParallel, or one to "
            "which fully_shard was applied"
        )
    return inner


def refuse_unhookable(ddp: DistributedDataParallel) -> None:
    """Refuse a model whose settings leave no place for a hook."""
    if getattr(ddp, "_use_python_reducer", False):
        raise UsageError(
            "ddp uses the Python reducer (torch._dynamo.config.optimize_ddp = 'python_reducer'), which has no bucket hook; "
            "set optimize_ddp to 'ddp_optimizer' or False before wrapping the model"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise UsageError(
            "ddp has skip_all_reduce_unused_params=True, which hides from a hook where a step ends; it must be False"
        )


def refuse_foreign_hooks(module: DistributedDataParallel) -> None:
    stale = [pair for pair in module._comm_hooks if is_stale(pair[0])]
    module._comm_hooks = [pair for pair in module._comm_hooks if pair not in stale]
    if module._comm_hooks:
        raise UsageError(
            "ddp already has a communication hook; DDP takes only one, so wrap the model anew without it"
        )


def is_stale(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), StaleHook)


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
