"""DistributedOptimizer: compressed data parallelism around any optimizer, without DDP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future
from torch.optim import Optimizer

from thinwire.adapters.checks import check_parameters
from thinwire.adapters.fusion import FusionBuffer, fuse
from thinwire.errors import UsageError
from thinwire.exchange.network import broadcast_into
from thinwire.handle import Handle
from thinwire.layout import ParameterInfo, describe_module, describe_parameters
from thinwire.methods.base import Method
from thinwire.opaque import in_compiled_backward, opaque
from thinwire.optim import take_over
from thinwire.plan.policy import Rule
from thinwire.validate import check_bool, check_instance, check_positive_int

logger = logging.getLogger(__name__)
Described = dict[str, tuple[nn.Parameter, ParameterInfo]]


class DistributedOptimizer(Optimizer):
    """Averages gradients over all ranks during backward; everything else is the wrapped optimizer's.

    Gradient hooks fill fusion buffers and start their exchange while backward goes on. The exchange finishes at the end
    of backward: `p.grad` is final when `backward()` returns, so clipping, `scaler.unscale_` and `scaler.step` need nothing
    special. Parameters (and buffers, if `model` is given) are broadcast from rank 0 at construction. A parameter without a
    gradient counts as zero, so that all ranks step alike.

    `state_dict()` is the wrapped optimizer's and loads into a plain one; `handle` is what `tw.attach` returns for DDP.

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
    ) -> None:
        check_instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        check_instance("method", method, Method, "a method such as tw.ADTopK(density=0.01)")
        check_positive_int("backward_passes_per_step", backward_passes_per_step)
        check_bool("average", average)
        if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or bucket_mb < 0:
            raise UsageError(
                f"bucket_mb is {bucket_mb!r}; it must be a number of megabytes, 0 for a bucket per parameter"
            )
        # The base class is not initialised: groups, state and hooks are the wrapped optimizer's own.
        self.optimizer = optimizer
        described = _describe(optimizer, model, named_parameters)
        parameters = {name: pair[0] for name, pair in described.items()}
        check_parameters(model, parameters)
        group = process_group or dist.group.WORLD
        if group is None:
            raise UsageError(
                "there is no process group; call torch.distributed.init_process_group first"
            )
        assert method is not None
        self.handle = Handle(
            {name: pair[1] for name, pair in described.items()},
            method,
            device=next(iter(parameters.values())).device,
            policy=policy,
            process_group=group,
            grad_scaler=grad_scaler,
            deterministic=deterministic,
            takeover=take_over(method, optimizer, parameters),
        )
        _broadcast_from_first(group, model, parameters.values())
        self.backward_passes_per_step = backward_passes_per_step
        self._factor = 1.0 if average else float(self.handle.world)
        self._buffers = fuse(list(described.values()), int(bucket_mb * 2**20))
        self._pass = BackwardPass(self._buffers)
        self._passes = 0
        self._delivered: dict[nn.Parameter, Tensor] = {}
        self._removers = self._register_hooks()

    # -- backward ----------------------------------------------------------------------------------------------

    def _register_hooks(self) -> list[Any]:
        removers = []
        for buffer in self._buffers:
            for index, parameter in enumerate(buffer.parameters):
                hook = self._hook_of(buffer, index)
                removers.append(parameter.register_post_accumulate_grad_hook(hook))
        return removers

    def _hook_of(self, buffer: FusionBuffer, index: int) -> Callable[[Tensor], None]:
        @opaque
        def on_gradient(parameter: Tensor) -> None:
            self._enter_backward()
            if self._pass.synchronising:
                self._refuse_second_backward(buffer.parameters[index])
                self._pass.arrived(buffer, index, self.handle)

        return on_gradient

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
            for buffer, update in self._pass.finish(self.handle):
                self._deliver(buffer, update)

    def _deliver(self, buffer: FusionBuffer, update: Tensor) -> None:
        if self._factor != 1.0:
            update.mul_(self._factor)
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
        """Gradients are final when backward returns, so there is nothing to wait for.

        The one exception: every parameter that was used lies inside reentrant checkpoints and some were not used; torch
        then does not tell that the outer backward ended, and the exchange finishes here or in `step`.
        """
        if self._pass.tasks:
            self._finish_backward()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts written for Horovod, which must not synchronise twice."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Exchange once every `passes` backwards; divide the loss by it to keep a mean."""
        check_positive_int("backward_passes_per_step", passes)
        if self._passes:
            raise UsageError(
                f"backward_passes_per_step cannot change after {self._passes} of {self.backward_passes_per_step} passes"
            )
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
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._forget_backward()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def _forget_backward(self) -> None:
        """The next backward starts afresh, also after one that failed halfway."""
        self._delivered.clear()
        self._pass.tasks.clear()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError(
            "parameters cannot be added after DistributedOptimizer was built; add the group to the plain optimizer first"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


class BackwardPass:
    """One backward: which buckets are full, started, done. Buckets start in one order on all ranks."""

    def __init__(self, buffers: list[FusionBuffer]) -> None:
        self.buffers = buffers
        self.tasks: set[int] = set()
        """Autograd's numbers of the backwards that are running, nested ones included."""
        self.synchronising = False
        self._futures: list[Future[Tensor]] = []

    def begin(self, synchronising: bool) -> None:
        self.synchronising = synchronising
        self._futures = []
        for buffer in self.buffers:
            buffer.reset()

    def arrived(self, buffer: FusionBuffer, index: int, handle: Handle) -> None:
        """A gradient is complete; start every bucket whose turn has come."""
        if index not in buffer.missing:
            name = buffer.bucket.layout.slots[index].name
            raise UsageError(
                f"the gradient of {name!r} arrived twice in one backward: weights shared between reentrant checkpoints "
                "need use_reentrant=False, and a backward that failed needs zero_grad() before the next"
            )
        buffer.fill(index)
        while (
            len(self._futures) < len(self.buffers) and not self.buffers[len(self._futures)].missing
        ):
            self._start(handle)

    def finish(self, handle: Handle) -> Iterator[tuple[FusionBuffer, Tensor]]:
        """Start what is left, parameters without a gradient counting as zero; yield buckets as they complete."""
        while len(self._futures) < len(self.buffers):
            buffer = self.buffers[len(self._futures)]
            for index in sorted(buffer.missing):
                buffer.fill(index)
            self._start(handle)
        for buffer, future in zip(self.buffers, self._futures, strict=True):
            yield buffer, future.wait()

    @property
    def incomplete(self) -> bool:
        return self.synchronising and any(buffer.missing for buffer in self.buffers)

    def _start(self, handle: Handle) -> None:
        bucket = self.buffers[len(self._futures)].bucket
        last = len(self._futures) + 1 == len(self.buffers)
        self._futures.append(handle.pipeline.reduce(bucket, last=last))


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
        logger.warning(
            "DistributedOptimizer was given no model; what each layer is gets guessed from shapes "
            "(embeddings look like linear layers), pass model= to choose selection axes by layer"
        )
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


def _broadcast_from_first(
    group: dist.ProcessGroup, model: nn.Module | None, parameters: Iterable[nn.Parameter]
) -> None:
    """Replicas that start apart stay apart."""
    tensors = list(model.state_dict().values()) if model is not None else list(parameters)
    root = dist.get_process_group_ranks(group)[0]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            broadcast_into(tensor, root, group)
