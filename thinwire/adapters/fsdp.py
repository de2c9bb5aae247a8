"""FSDP adapter: what FSDP2 sends between replicas, compressed. Between shards nothing changes.

FSDP sums a unit's gradients over its shards, and then over the replicas. The second sum is answered here. Two ways lead in:

1. `fully_shard` over a 2-D mesh and `replicate` ask a process group for one all-reduce per unit; a stand-in answers it.
2. `fully_shard` over a 1-D mesh calls a hook (`set_all_reduce_hook`), which is public.

FSDP takes what it gets back for the mean and hands it out as gradients at once. A unit is answered in one of three ways:

in place   the gradients will be views of the reduced buffer: the exchange goes on meanwhile and writes there
later      they will be copies: FSDP is given zeros, and the mean is added to the gradients when backward ends
now        somebody reads or divides them before that: the exchange ends first
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.adapters.checks import check_optimizer, check_parameters
from thinwire.adapters.fsdp_state import make_form
from thinwire.adapters.fsdp_units import Unit, find_units
from thinwire.adapters.handles import make_handle, warn_if_vain
from thinwire.auto import Prospect
from thinwire.engine.agreement import agree
from thinwire.engine.device_drivers import make_driver
from thinwire.engine.failures import failing_as
from thinwire.engine.opaque import in_compiled_backward, opaque
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.layout import Bucket
from thinwire.memory.store import let_go
from thinwire.methods.base import ADAM_TAKEOVER, Method


def attach_fsdp(
    model: nn.Module,
    method: Method,
    *,
    process_group: dist.ProcessGroup | None,
    optimizer: torch.optim.Optimizer | None,
    watch: int | None,
    on_difference: str,
    **options: Any,
) -> Handle:
    """Compress what an FSDP2 model sends between replicas; `options` are those of `make_handle`."""
    refuse_settings(model, watch, on_difference)
    units = find_units(model)
    parameters = {name: p for unit in units for name, p in unit.parameters.items()}
    check_parameters(model, parameters)
    replicas = find_replicas(units, process_group)
    check_optimizer(optimizer, parameters)
    prospect = Prospect(optimizer, parameters, REFUSED)
    takeover = prospect.take_over(method)
    form = make_form(units)
    if options["checksum"] and any(group.size() > 1 for group in form.groups()):
        raise UsageError(
            "checksum is True, but the ranks of other shards would not learn of a damaged message; with shards it must be False"
        )
    for group in form.groups():
        # Between replicas it is compared by the reducer.
        agree(group, {"method": repr(method), "policy": str(options["policy"])})
    device = units[0].device
    handle = make_handle(
        {info.name: info for unit in units for info in unit.infos},
        method,
        partial(make_driver, replicas, device, in_turn=True),
        device=device,
        takeover=takeover,
        prospect=prospect,
        form=form,
        **options,
    )
    # FSDP's buffers lie somewhere else in every step, so that buckets made of several would be planned anew.
    handle.reducer.merge_bytes = 0
    try:
        if takeover is not None:
            takeover.commit([handle])
        FsdpHook(model, handle, units, replicas, form.groups())
    except Exception:
        handle.close()
        raise
    warn_if_vain(handle)
    return handle


def refuse_settings(model: nn.Module, watch: int | None, on_difference: str) -> None:
    """Refuse what needs no look at the parameters."""
    if getattr(model, HOOK, None) is not None:
        raise UsageError(
            "attach was called twice on this model; use handle.switch(...) to change the method or handle.close() first"
        )
    if watch is not None or on_difference != "raise":
        raise UsageError(
            f"watch is {watch} and on_difference is {on_difference!r}; replicas of sharded models are not compared, so they "
            "must be None and 'raise'"
        )


def find_replicas(units: Sequence[Unit], asked: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks that hold the same shards: those of the mesh, or what the user says."""
    own = {unit.replicas for unit in units}
    if own == {None}:
        if asked is None:
            raise UsageError(
                "process_group is None and the model is sharded over a 1-D mesh; pass the group of ranks that hold the same "
                "shard, or use fully_shard with a 2-D mesh"
            )
        return asked
    if None in own:
        whole = next(unit for unit in units if unit.replicas is None)
        raise UsageError(
            f"parameter {next(iter(whole.parameters))!r} is sharded over a 1-D mesh, so that it has no replicas, and others have "
            "some; all units must be copied over the same ranks"
        )
    if len(own) > 1:
        raise UsageError(
            f"the model's units are copied over {len(own)} different groups of ranks; they must all have the same one"
        )
    group = own.pop()
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    if asked is not None and dist.get_process_group_ranks(asked) != ranks:
        raise UsageError(
            f"process_group has the ranks {dist.get_process_group_ranks(asked)}; it must have those of the mesh's replicas, "
            f"{ranks}"
        )
    return asked or group


REFUSED = {
    ADAM_TAKEOVER: "with Adam's moments taken over, which sharded models do not have yet; use another method or "
    "DistributedDataParallel"
}
"""What cannot be taken over from the optimizer of a sharded model, and why."""
HOOK = "_thinwire_hook"
"""The attribute of a model under which its hook is found while a handle is attached."""


class StandIn:
    """What a unit takes for its group of replicas. It is asked for one all-reduce per backward, and knows whose it is."""

    def __init__(self, real: dist.ProcessGroup, unit: Unit, hook: FsdpHook) -> None:
        self._real, self._unit, self._hook = real, unit, hook

    # Torch keeps what it knows of a group in dicts. It has to find the real one's entries, to describe it in errors too.
    def __hash__(self) -> int:
        return hash(self._real)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        """Torch takes None for: done."""
        (flat,) = tensors
        # With a divide factor, or in a narrow dtype, FSDP divides by itself and wants the sum.
        summed = options.reduceOp == dist.ReduceOp.SUM
        self._hook.reduce(self._unit, flat, self._real.size() if summed else 1)


@dataclass(eq=False)
class Pending:
    """A unit that was answered before its exchange had ended."""

    unit: Unit
    future: Future[Tensor]
    factor: int
    """What its mean is multiplied with."""
    in_place: bool


class FsdpHook:
    """Answers FSDP's all-reduces while backward goes on, and ends the step with it.

    `siblings` are the groups over which the ranks of one replica are reached, `replicas` the ranks to exchange with.
    """

    def __init__(
        self,
        model: nn.Module,
        handle: Handle,
        units: Sequence[Unit],
        replicas: dist.ProcessGroup,
        siblings: Sequence[dist.ProcessGroup],
    ) -> None:
        self.handle = handle
        self._replicas = replicas
        self._siblings = siblings
        self._units: list[Unit] = []
        """Those that were answered in the step that is under way."""
        self._adds_up = False
        """Whether its gradients are added to those of the step before it, so that an optimizer takes both or neither."""
        self._taken = False
        """Whether an optimizer has stepped since the last backward."""
        self._pending: list[Pending] = []
        self._tasks: set[int] = set()
        """Autograd's numbers of the backwards that are running, nested ones included."""
        setattr(model, HOOK, self)
        handle.on_close(lambda: delattr(model, HOOK))
        handle.on_close(model.register_forward_pre_hook(self._begin_forward, prepend=True).remove)
        handle.on_close(self._watch_optimizers())
        for unit in units:
            self._connect(unit)
        handle.movable(partial(self._find_group, units))

    def _connect(self, unit: Unit) -> None:
        real = unit.replicas
        if real is not None:
            unit.stand_in(StandIn(real, unit, self))
            self.handle.on_close(partial(unit.stand_in, real))
            return
        assert isinstance(unit.module, FSDPModule)
        unit.module.set_all_reduce_hook(partial(self._on_reduced, unit))

    def _watch_optimizers(self) -> Callable[[], None]:
        """Be told of every step of any optimizer; returns what ends it.

        What writes to all parameters at once, as fused optimizers do, leaves no count of it at the parameters.
        """
        note_step = weakref.WeakMethod(self._note_step)

        @opaque
        def told(*_: Any) -> None:
            note = note_step()
            if note is not None:
                note()

        remover = register_optimizer_step_post_hook(told)
        weakref.finalize(self, remover.remove)
        return remover.remove

    def _note_step(self) -> None:
        self._taken = True

    @opaque
    def _on_reduced(self, unit: Unit, flat: Tensor) -> None:
        """The hook of a 1-D mesh. There FSDP drops the buffer before its own stream is through with it."""
        if self.handle.closed:
            # FSDP keeps the hook.
            with failing_as(self._replicas, "gradients"):
                dist.all_reduce(flat, group=self._replicas)
            flat.div_(self._replicas.size())
            return
        let_go(flat)
        self.reduce(unit, flat, 1)

    def _find_group(
        self,
        units: Sequence[Unit],
        process_group: dist.ProcessGroup | None,
        model: nn.Module | None,
    ) -> dist.ProcessGroup:
        """The group that `handle.regroup` moves to."""
        if any(unit.replicas is not None for unit in units):
            raise UsageError(
                "FSDP cannot change the mesh of a model; save the handle in a distributed checkpoint, shard the model anew, "
                "attach and call handle.load_checkpoint(path, on_world_change='mean')"
            )
        if process_group is None:
            raise UsageError(
                "process_group is None; pass regroup the ranks that hold the same shard"
            )
        self._replicas = process_group
        return process_group

    # -- backward ----------------------------------------------------------------------------------------------

    @opaque
    @torch.no_grad()
    def reduce(self, unit: Unit, flat: Tensor, factor: int) -> None:
        """Have `flat` hold `factor` times the mean over the replicas, by the end of backward at the latest."""
        layout = unit.layout(flat)
        self._enter_backward(unit)
        reducer = self.handle.reducer
        if not self._units:
            self._adds_up = unit.adds_up() and not self._taken
            if self._adds_up:
                reducer.go_on()
        self._units.append(unit)
        if unit.is_watched() or unit.divides(flat):
            future = reducer.reduce(Bucket(layout, flat))
            reducer.flush()
            future.wait()
            if factor != 1:
                flat.mul_(factor)
            return
        in_place = unit.hands_out(flat)
        reduced = flat if in_place else flat.clone()
        if not in_place:
            flat.zero_()
        future = reducer.reduce(Bucket(layout, reduced))
        self._pending.append(Pending(unit, future, factor, in_place))

    @opaque
    def _begin_forward(self, *_: Any) -> None:
        """What is under way when a forward begins is left from a backward that failed."""
        if self._tasks and torch._C._current_graph_task_id() == -1:
            self._tasks.clear()
            self._units, self._pending = [], []
            self.handle.reducer.abandon()

    def _enter_backward(self, unit: Unit) -> None:
        """Ask to be called at the end of this backward."""
        task = torch._C._current_graph_task_id()
        if task == -1 or in_compiled_backward():
            raise UsageError(
                "torch._dynamo.config.compiled_autograd is on, under which nobody is told when a backward ends; "
                "switch it off, torch.compile itself may stay"
            )
        if task not in self._tasks:
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(self._end_backward)
        if unit in self._units:
            # A unit whose modules are used apart is reduced several times in one backward.
            self._end_step()

    @opaque
    def _end_backward(self) -> None:
        """Runs behind FSDP's own end of backward, which was asked for when backward began."""
        self._tasks.discard(torch._C._current_graph_task_id())
        self._end_step()

    @torch.no_grad()
    def _end_step(self) -> None:
        """Deliver what was not delivered in place, and share the verdict."""
        units, pending = self._units, self._pending
        self._units, self._pending = [], []
        self.handle.reducer.end_backward()
        for one in pending:
            update = one.future.wait()
            if one.factor != 1:
                update.mul_(one.factor)
            if not one.in_place:
                for gradient, slot in zip(
                    one.unit.gradients(), one.unit.layout(update).slots, strict=True
                ):
                    assert gradient is not None, "FSDP has just made it"
                    gradient.add_(slot.view(update))
                let_go(update)
        if self._siblings or self._adds_up:
            self._share_verdict(units)
        for unit in units:
            unit.delivered()
        self._taken = False

    def _share_verdict(self, units: Sequence[Unit]) -> None:
        """A gradient that is not finite in one shard is seen by the ranks that hold the others: one word per step.

        What an earlier backward has left not finite cannot become finite by adding to it.
        """
        bad = self.handle.reducer.verdict()
        if self._adds_up:
            spoilt = [~probe.isfinite() for unit in units for probe in unit.probes()]
            bad = torch.stack([bad, *spoilt]).any()
        word = bad.to(torch.int32)
        for group in self._siblings:
            with failing_as(group, "verdicts"):
                dist.all_reduce(word, dist.ReduceOp.MAX, group=group)
        bad = word > 0
        self.handle.reducer.overrule(bad)
        if bad.device.type == "cpu" and not bool(bad):
            return
        # An optimizer in backward has taken its gradients already.
        held = [gradient for unit in units for gradient in unit.gradients() if gradient is not None]
        factor = torch.where(bad, torch.nan, 1.0)
        for dtype in {gradient.dtype for gradient in held}:
            alike = [gradient for gradient in held if gradient.dtype == dtype]
            torch._foreach_mul_(alike, factor.to(dtype))
