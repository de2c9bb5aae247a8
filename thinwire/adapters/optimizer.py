"""DistributedOptimizer: compressed data parallelism around any optimizer, without DDP."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from thinwire.adapters.backward_pass import BackwardPass
from thinwire.adapters.checks import (
    check_bucket_mb,
    check_parameters,
    find_group,
    has_own_collectives,
)
from thinwire.adapters.fusion import FusionBuffer, fuse
from thinwire.adapters.handles import make_handle, warn_if_vain
from thinwire.adapters.wrapped import WrappedOptimizer
from thinwire.auto import Prospect
from thinwire.engine.device_drivers import make_driver
from thinwire.engine.network import share_from_first
from thinwire.engine.opaque import in_compiled_backward, opaque
from thinwire.engine.replicas import ReplicaWatch
from thinwire.engine.watching import look_at_replicas
from thinwire.errors import UsageError
from thinwire.layout import ParameterInfo, describe_module, describe_parameters
from thinwire.methods.base import Method, check_method
from thinwire.optim.takeover import take_over
from thinwire.plan.policy import Rule
from thinwire.validate import check_bool, check_instance, check_positive_int

logger = logging.getLogger(__name__)
PASSES = "backward_passes_per_step"
NO_MODEL = (
    "DistributedOptimizer was given no model; what each layer is gets guessed from shapes "
    "(embeddings look like linear layers), pass model= to choose selection axes by layer"
)
Described = dict[str, tuple[nn.Parameter, ParameterInfo]]


class DistributedOptimizer(WrappedOptimizer):
    """Averages gradients over all ranks during backward; everything else is the wrapped optimizer's.

    Gradient hooks fill fusion buffers and start their exchange while backward goes on. The exchange finishes at the end
    of backward: `p.grad` is final when `backward()` returns, so clipping, `scaler.unscale_` and `scaler.step` need nothing
    special. Parameters (and buffers, if `model` is given) are broadcast from rank 0 at construction. A parameter without a
    gradient counts as zero, so that all ranks step alike.

    `state_dict()` is the wrapped optimizer's and loads into a plain one; `handle` is what `tw.attach` returns for DDP.

    Args:
        optimizer: Any torch optimizer.
        model: The model whose parameters it has; it tells the kind of each layer.
        named_parameters: Names and parameters, if you have no model to pass.
        method: How gradients are sent: tw.Auto(), which measures and chooses, or one by name such as tw.ADTopK(density=0.01).
        bucket_mb: Megabytes of gradients that are exchanged together; 0 for every parameter by itself.
        backward_passes_per_step: Backwards after which gradients are exchanged.
        average: Whether the update is the mean of all ranks' gradients, or their sum.
        policy: Rules for single parameters; the first match wins.
        process_group: The ranks to exchange with; all unless given.
        grad_scaler: The GradScaler of the loss, if there is one; what is held back is then stored without the loss scale.
        deterministic: Add dense parts in rank order, so that resuming is bit-exact whatever the bucketing.
        skippable: You may call `handle.discard_step()`: a step that is not applied then leaves no trace in what is held
            back. That takes 4 bytes more per compressed parameter; with a `grad_scaler` it is always on.
        skipped: What a skipped step leaves: with "forget" nothing. With "keep" what it sent is held back again, with the
            finite part of its gradient, and no extra bytes are needed.
        checksum: Check every message, and refuse a damaged one on all ranks in the same step: `backward()` raises a
            `DamageError`, and training can go on. Every collective is followed by a small one, for which the host waits on
            CUDA too.
        watch: Compare the replicas every so many steps, by a fingerprint of the parameters and of the last update. None for
            never.
        on_difference: What is done about replicas that differ: "raise", or "repair" to copy parameters and the optimizer's state
            from the majority. Without a majority it raises.

    >>> opt = tw.DistributedOptimizer(opt, model=model, method=tw.ADTopK(density=0.01))
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        method: Method | None = None,
        *,
        bucket_mb: float = 25,
        backward_passes_per_step: int = 1,
        average: bool = True,
        policy: Sequence[Rule] | None = None,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Any = None,
        deterministic: bool = False,
        skippable: bool = False,
        skipped: str = "forget",
        checksum: bool = False,
        watch: int | None = None,
        on_difference: str = "raise",
    ) -> None:
        check_instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        check_method(method)
        own = _check_own(bucket_mb, backward_passes_per_step, average)
        super().__init__(optimizer)
        described = _describe(optimizer, model, named_parameters)
        parameters = {name: pair[0] for name, pair in described.items()}
        check_parameters(model, parameters)
        group = find_group(process_group)
        assert method is not None
        if model is None and not method.is_dense:
            logger.warning(NO_MODEL)
        takeover = take_over(method, optimizer, parameters)
        device = next(iter(parameters.values())).device
        self.handle = make_handle(
            {name: pair[1] for name, pair in described.items()},
            method,
            partial(make_driver, group, device, in_turn=has_own_collectives(model)),
            device=device,
            policy=policy,
            grad_scaler=grad_scaler,
            deterministic=deterministic,
            checksum=checksum,
            skippable=skippable,
            skipped=skipped,
            takeover=takeover,
            replicas=ReplicaWatch(parameters, watch, on_difference, optimizer),
            settings=own,
            prospect=Prospect(optimizer, parameters),
        )
        if takeover is not None:
            takeover.commit([self.handle])
        warn_if_vain(self.handle)
        share_from_first((parameters if model is None else model.state_dict()).values(), group)
        self.backward_passes_per_step = backward_passes_per_step
        self._average = average
        self._buffers = fuse(list(described.values()), int(bucket_mb * 2**20))
        self._pass = BackwardPass(self._buffers, self.handle, group)
        self._passes = 0
        self._delivered: dict[nn.Parameter, Tensor] = {}
        self._removers = self._register_hooks()

    # -- backward ----------------------------------------------------------------------------------------------

    def _register_hooks(self) -> list[Any]:
        removers = []
        for number, buffer in enumerate(self._buffers):
            for index, parameter in enumerate(buffer.parameters):
                hook = self._hook_of(number, index)
                removers.append(parameter.register_post_accumulate_grad_hook(hook))
        return removers

    def _hook_of(self, number: int, index: int) -> Callable[[Tensor], None]:
        """Knows the optimizer by a weak reference: nobody finds a circle that leads through a parameter's hooks."""
        myself = weakref.ref(self)

        @opaque
        def on_gradient(parameter: Tensor) -> None:
            optimizer = myself()
            if optimizer is not None:
                optimizer._take_gradient(optimizer._buffers[number], index)

        return on_gradient

    def _take_gradient(self, buffer: FusionBuffer, index: int) -> None:
        self._enter_backward()
        if self._pass.synchronising:
            self._refuse_second_backward(buffer.parameters[index])
            self._pass.arrived(buffer, index)

    def _enter_backward(self) -> None:
        """On the first gradient of a backward, ask to be called at its end."""
        task = torch._C._current_graph_task_id()
        if not self._pass.tasks:
            self._refuse_compiled_autograd()
            last = self._passes + 1 >= self.backward_passes_per_step
            self._pass.begin(synchronising=last)
        if task not in self._pass.tasks:
            self._pass.tasks.add(task)
            Variable._execution_engine.queue_callback(self._end_backward)

    @opaque
    def _end_backward(self) -> None:
        """Reentrant checkpointing runs backwards inside a backward, each with its own end: wait for the outermost, or
        for the last gradient."""
        nested = torch._C._current_autograd_node() is not None
        if self._pass.tasks and not (nested and self._pass.incomplete):
            self._finish_backward()

    @torch.no_grad()
    def _finish_backward(self) -> None:
        self._pass.tasks.clear()
        self._passes += 1
        if self._pass.synchronising:
            self._passes = 0
            self._deliver_all()

    def _deliver_all(self) -> None:
        for buffer, update in self._pass.finish():
            self._deliver(buffer, update)
        if not self.handle.closed:
            look_at_replicas(self.handle.reducer)

    def _deliver(self, buffer: FusionBuffer, update: Tensor) -> None:
        if not self._average:
            update.mul_(self.handle.world)
        for parameter, slot in zip(buffer.parameters, buffer.bucket.layout.slots, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(slot.view(update))
            self._delivered[parameter] = parameter.grad

    def _refuse_compiled_autograd(self) -> None:
        """It drops what is asked for at the end of a backward, so that gradients would be averaged after clipping, or never."""
        if in_compiled_backward():
            raise UsageError(
                "torch._dynamo.config.compiled_autograd is on, under which nobody is told when a backward ends; "
                "switch it off, torch.compile itself may stay"
            )

    def _refuse_second_backward(self, parameter: nn.Parameter) -> None:
        """An averaged gradient that is still there would be compressed a second time."""
        if self._delivered.get(parameter) is parameter.grad and parameter.grad is not None:
            raise UsageError(
                "backward ran again before step() or zero_grad(), so the averaged gradient would be sent twice; "
                f"backward_passes_per_step is {self.backward_passes_per_step}, raise it to accumulate"
            )

    # -- the Horovod face --------------------------------------------------------------------------------------

    @opaque
    def synchronize(self) -> None:
        """Gradients are final when the last backward of a step returns, so there is mostly nothing to wait for.

        Two exceptions are finished here or in `step`. Fewer backwards ran than `backward_passes_per_step`: what they
        accumulated is exchanged now. Or every parameter that was used lies inside reentrant checkpoints and some were not
        used: torch then does not tell that the outer backward ended.
        """
        if self._pass.tasks:
            self._finish_backward()
        if self._passes:
            self._exchange_now()

    def contribute_nothing(self) -> None:
        """Take part in one exchange of the other ranks with zeros. The update it brings is dropped."""
        self.optimizer.zero_grad()
        replicas = self.handle.reducer.replicas
        if replicas is not None:
            # Its parameters stand still while those of the others go on.
            replicas.aside = True
        self._exchange_now()
        self.zero_grad()

    @torch.no_grad()
    def _exchange_now(self) -> None:
        """Exchange the gradients as they are, outside of any backward."""
        self._pass.begin(synchronising=True)
        self._passes = 0
        self._deliver_all()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Exchange once every `passes` backwards; divide the loss by it to keep a mean."""
        check_positive_int("backward_passes_per_step", passes)
        if self._passes:
            raise UsageError(
                f"backward_passes_per_step cannot change after {self._passes} of {self.backward_passes_per_step} passes"
            )
        if not self.handle.closed:
            self.handle.reducer.driver.agree({PASSES: str(passes)})
        self.backward_passes_per_step = passes

    def close(self) -> None:
        """Take the hooks off and stop; the wrapped optimizer goes on alone."""
        for remover in self._removers:
            remover.remove()
        self._removers = []
        self.handle.close()

    # -- the wrapped optimizer ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.synchronize()
        self._delivered.clear()
        return self.step_wrapped(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._forget_backward()
        super().zero_grad(set_to_none=set_to_none)

    @opaque
    def _forget_backward(self) -> None:
        """The next backward starts afresh, also after one that failed halfway."""
        self._delivered.clear()
        self._pass.tasks.clear()
        self._passes = 0


def _check_own(bucket_mb: Any, passes: Any, average: Any) -> dict[str, str]:
    """The settings of this adapter, which have to be the same on all ranks."""
    check_positive_int(PASSES, passes)
    check_bool("average", average)
    check_bucket_mb(bucket_mb)
    return {"bucket_mb": str(float(bucket_mb)), PASSES: str(passes), "average": str(average)}


def _describe(
    optimizer: Optimizer,
    model: nn.Module | None,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None,
) -> Described:
    """Names and kinds of the optimizer's parameters, in registration order."""
    owned = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if model is not None:
        described = describe_module(model)
    else:
        named = list(named_parameters) if named_parameters is not None else _numbered(optimizer)
        names = [name for name, _ in named]
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise UsageError(
                f"named_parameters holds the name {repeated!r} twice; names must differ"
            )
        described = describe_parameters(named)
    known = {id(parameter) for parameter, _ in described.values()}
    if not all(id(parameter) in known for parameter in owned):
        missing = sum(id(parameter) not in known for parameter in owned)
        source = "model" if model is not None else "named_parameters"
        raise UsageError(
            f"{source} does not hold {missing} of the optimizer's {len(owned)} parameters"
        )
    wanted = {id(parameter) for parameter in owned}
    return {name: pair for name, pair in described.items() if id(pair[0]) in wanted}


def _numbered(optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"group{g}.parameter{i}", parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]
