"""Handle: what the user holds of an attached model, the same for every adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import checkpoint
from thinwire.compressor import FlushCompressor
from thinwire.convoy import WORTH_SENDING
from thinwire.errors import UsageError
from thinwire.exchange.drivers import Driver, StreamDriver, ThreadDriver
from thinwire.exchange.hierarchy import join_hosts
from thinwire.exchange.network import Network, agree, private_group
from thinwire.layout import ParameterInfo, Shard
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger
from thinwire.observe.stats import Stats, Tally
from thinwire.opaque import opaque
from thinwire.optim import Takeover
from thinwire.pipeline import Pipeline
from thinwire.plan.planner import Planner
from thinwire.plan.policy import Rule
from thinwire.plan.report import PlanReport
from thinwire.validate import check_bool, check_instance

logger = logging.getLogger(__name__)


class Handle:
    """A compressed gradient exchange at work: ask it what it does, save it, change it, end it.

    Also a `torch.distributed.checkpoint` Stateful.
    """

    worth_sending: ClassVar[int] = WORTH_SENDING
    """Bytes for which buckets wait for each other."""
    ledger: Ledger

    def __init__(
        self,
        infos: Mapping[str, ParameterInfo],
        method: Method,
        *,
        device: torch.device,
        policy: Sequence[Rule] | None,
        process_group: dist.ProcessGroup | None,
        grad_scaler: Any,
        deterministic: bool,
        takeover: Takeover | None = None,
    ) -> None:
        check_settings(method, policy, deterministic)
        scale = scale_reader(grad_scaler)
        self._infos = dict(infos)
        self._takeover = takeover
        self._method, self._policy = self._bind(method, policy or [])
        self._deterministic = deterministic
        self._scaled = grad_scaler is not None and grad_scaler.is_enabled()
        driver = self._connect(process_group, device)
        try:
            # First of all: a rank that raised alone would leave the others waiting.
            self._agree(self._method, self._policy)
            self._planner = Planner(
                self._infos.values(), self._method, self._policy, driver.place.world
            )
            plan = self._planner.plan(0)
            self._join_hosts()
        except Exception:
            driver.close()
            raise
        self.pipeline = Pipeline(
            plan,
            driver,
            Tally(self.ledger),
            device=device,
            deterministic=deterministic,
            scale=scale,
            replan=lambda step: self._planner.change(step),
            worth_sending=self.worth_sending,
        )
        self._on_close: list[Callable[[], None]] = []
        self.closed = False
        self._commit_takeover()

    def _connect(self, process_group: dist.ProcessGroup | None, device: torch.device) -> Driver:
        """What runs the exchanges; also sets `ledger`."""
        assert process_group is not None
        driver, self.ledger = make_driver(process_group, device)
        self._network = driver.network
        self._network_group = driver.network.group
        return driver

    def _commit_takeover(self) -> None:
        if self._takeover is not None:
            self._takeover.commit(self)

    # -- what it does ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.pipeline.driver.place.rank

    @property
    def world(self) -> int:
        return self.pipeline.driver.place.world

    @opaque
    def stats(self, *, dimensions: bool = False) -> Stats:
        """What was sent so far on this rank.

        `dimensions` adds which rows of each layer the last step left out (`Stats.dimensions`); that costs a selection or
        two, so ask for it when you want to see it.
        """
        left_out = self.pipeline.dimensions() if dimensions else None
        self.pipeline.settle()
        memory_bytes = sum(m.nbytes() for m in self.pipeline.roster.memories())
        return self.pipeline.tally.stats(self.pipeline.step, memory_bytes, left_out)

    def plan(self) -> PlanReport:
        """What happens to every parameter and why; print it."""
        assignments = self.pipeline.roster.assignments
        notes = {
            name: "sends what is held back once, then changes method"
            for name, assignment in assignments.items()
            if isinstance(assignment.compressor, FlushCompressor)
        }
        return PlanReport(tuple(a.plan for a in assignments.values()), notes)

    @opaque
    def residual(self, name: str) -> Tensor:
        """What is held back of a parameter on this rank, in its shape; zeros if nothing is.

        Under `tw.Hierarchical` it is this rank's shard only; `shard(name)` says which part that is. What a switch or a
        change of the world left on this rank outside the shard goes to its owner in the next step, and is in
        `state_dict()` until then.
        """
        shard = self.shard(name)
        self.pipeline.settle()
        held = self.pipeline.roster.held(name, "residual")
        if held is None:
            return torch.zeros(shard.shape, device=self.pipeline.device)
        if shard.size is None:
            return held
        slot = self._infos[name].slot(0)
        flat = held.new_empty(slot.numel)
        slot.view(flat).copy_(held)
        return slot.part(flat, shard).clone()

    def shard(self, name: str) -> Shard:
        """Which part of a parameter `residual(name)` holds: dimension, offset and size; the whole unless sharded."""
        if name not in self._infos:
            raise UsageError(f"name is {name!r}; the handle knows {_some(self._infos)}")
        compressor = self.pipeline.roster.assignments[name].compressor
        return compressor.shard(self._infos[name].slot(0), self.pipeline.driver.place)

    # -- changing it -------------------------------------------------------------------------------------------

    @opaque
    def switch(self, method: Method, *, policy: Sequence[Rule] | None = None) -> None:
        """Use another method from the next step on; every rank must call it at the same step.

        What is held back carries over, or is sent densely once where the new method has no place for it.
        """
        self._refuse_if_closed()
        check_settings(method, policy, False)
        method, rules = self._bind(method, self._policy if policy is None else policy)
        self._agree(method, rules)
        planner = Planner(self._infos.values(), method, rules, self.world)
        plan = planner.plan(self.pipeline.step)
        self._method, self._policy, self._planner = method, rules, planner
        self._join_hosts()
        self.pipeline.switch(plan)

    @opaque
    def discard_step(self) -> None:
        """Say that the last step was not applied: what it sent returns to memory.

        Call it before the next backward or `switch`, on every rank, when you skip `optimizer.step()` by a rule of your own.
        """
        self.pipeline.settle(discard=True)

    @opaque
    def close(self) -> None:
        """Stop compressing and free the memories; gradients are then averaged densely.

        What is still held back is dropped, with a warning. `switch(tw.Dense())` and one more step send it first.
        """
        if self.closed:
            return
        self.pipeline.end_step()
        held = sum(m.nbytes() for m in self.pipeline.roster.memories())
        if held:
            logger.warning(
                "close() drops %.1f MB of gradient that was held back; switch(tw.Dense()) and one more step "
                "would have sent it",
                held / 1e6,
            )
        self.closed = True
        self.pipeline.release()
        for action in self._on_close:
            action()
        self.pipeline.driver.close()

    def on_close(self, action: Callable[[], None]) -> None:
        """Have `action` called when the handle closes."""
        self._on_close.append(action)

    # -- saving it ---------------------------------------------------------------------------------------------

    @opaque
    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors and numbers, by parameter name."""
        self.pipeline.settle()
        return checkpoint.wrap_rank(self.rank, self.world, self.pipeline.state_dict())

    @opaque
    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        on_world_change: str | None = None,
    ) -> None:
        """Restore this rank's state, or, from the states of all ranks of another world, its mean or nothing."""
        self._refuse_if_closed()
        states = [state] if isinstance(state, Mapping) else list(state)
        content = checkpoint.pick_rank(states, self.rank, self.world, on_world_change)
        self.pipeline.load_state_dict(content)

    def load_checkpoint(self, path: str | Path, *, on_world_change: str | None = None) -> None:
        """Restore from a distributed checkpoint that holds a handle, saved with any number of ranks."""
        self._refuse_if_closed()
        content = checkpoint.read_distributed(path, self.rank, self.world, on_world_change)
        self.pipeline.load_state_dict(content)

    # -- inside ------------------------------------------------------------------------------------------------

    def _bind(self, method: Method, policy: Sequence[Rule]) -> tuple[Method, list[Rule]]:
        """The settings with what was taken over from the optimizer in them."""
        if self._takeover is not None:
            return self._takeover.bind(method), self._takeover.bind_policy(policy)
        if method.owns_momentum:
            raise UsageError(
                f"method is {type(method).__name__}, which takes momentum over from the optimizer; attach with it and "
                "optimizer=opt instead of switching to it"
            )
        return method, list(policy)

    def _agree(self, method: Method, policy: Sequence[Rule]) -> None:
        settings = {
            "method": repr(method),
            "policy": "; ".join(map(str, policy)) or "none",
            "deterministic": str(self._deterministic),
            "grad_scaler": "enabled" if self._scaled else "none",
        }
        for name, info in self._infos.items():
            settings[f"parameter {name}"] = f"{list(info.shape)} {list(info.strides)} {info.dtype}"
        agree(self._network_group, settings)

    def _join_hosts(self) -> None:
        """Groups inside and between hosts, for the methods that want them."""
        join_hosts(self._network, self._host_sizes())

    def _host_sizes(self) -> set[int]:
        """What all methods that may come to work say of their hosts."""
        methods = [self._method, *(rule.method for rule in self._policy if rule.method is not None)]
        return {size for method in methods for size in method.host_sizes}

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise UsageError("the handle is closed; attach again to compress")


def check_settings(method: Any, policy: Any, deterministic: Any) -> None:
    check_instance("method", method, Method, "a method such as tw.ADTopK(density=0.01)")
    check_bool("deterministic", deterministic)
    if policy is not None:
        check_instance("policy", policy, Sequence, "a list of tw.rule(...)")
    for entry in policy or []:
        check_instance("policy", entry, Rule, "a list of tw.rule(...)")


def make_driver(
    process_group: dist.ProcessGroup, device: torch.device
) -> tuple[ThreadDriver | StreamDriver, Ledger]:
    """The driver that fits the device: side streams for CUDA, blocking collectives otherwise; both have a thread, with a group
    of its own."""
    ledger = Ledger(dist.get_world_size(process_group))
    if device.type == "cuda":
        return StreamDriver(Network(private_group(process_group, device), ledger), device), ledger
    return ThreadDriver(Network(private_group(process_group), ledger)), ledger


def scale_reader(grad_scaler: Any) -> Callable[[], Tensor | None]:
    """How to read the current loss scale without waiting for the device."""
    if grad_scaler is None:
        return lambda: None
    if not hasattr(grad_scaler, "_get_scale_async") or not hasattr(grad_scaler, "is_enabled"):
        raise UsageError(f"grad_scaler is {grad_scaler!r}; it must be a torch.amp.GradScaler")
    if not grad_scaler.is_enabled():
        return lambda: None
    return grad_scaler._get_scale_async


def _some(names: Mapping[str, Any]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:5])
    return shown if len(listed) <= 5 else f"{shown} and {len(listed) - 5} more"
