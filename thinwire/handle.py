"""Handle: what the user holds of an attached model, the same for every adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import checkpoint
from thinwire.compressor import FlushCompressor
from thinwire.errors import UsageError
from thinwire.exchange.drivers import StreamDriver, ThreadDriver
from thinwire.exchange.network import Network, agree, private_group
from thinwire.layout import ParameterInfo
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger
from thinwire.observe.stats import Stats, Tally
from thinwire.pipeline import Pipeline
from thinwire.plan.policy import Rule, make_plan
from thinwire.plan.report import PlanReport
from thinwire.validate import check_bool, check_instance

logger = logging.getLogger(__name__)


class Handle:
    """A compressed gradient exchange at work: ask it what it does, save it, change it, end it.

    Also a `torch.distributed.checkpoint` Stateful.
    """

    def __init__(
        self,
        infos: Mapping[str, ParameterInfo],
        method: Method,
        *,
        device: torch.device,
        policy: Sequence[Rule] | None,
        process_group: dist.ProcessGroup,
        grad_scaler: Any,
        deterministic: bool,
    ) -> None:
        check_settings(method, policy, deterministic)
        self._infos = dict(infos)
        self._policy = list(policy or [])
        self._method = method
        driver, self.ledger = make_driver(process_group, device)
        self._network_group = driver.network.group
        plan = make_plan(self._infos.values(), method, self._policy, driver.place.world)
        self._agree(method)
        self.pipeline = Pipeline(
            plan,
            driver,
            Tally(self.ledger),
            device=device,
            deterministic=deterministic,
            scale=scale_reader(grad_scaler),
        )
        self._on_close: list[Callable[[], None]] = []
        self.closed = False

    # -- what it does ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.pipeline.driver.place.rank

    @property
    def world(self) -> int:
        return self.pipeline.driver.place.world

    def stats(self) -> Stats:
        """What was sent so far on this rank."""
        self.pipeline.settle()
        memory_bytes = sum(m.nbytes() for m in self.pipeline.memories())
        return self.pipeline.tally.stats(self.pipeline.step, memory_bytes)

    def plan(self) -> PlanReport:
        """What happens to every parameter and why; print it."""
        assignments = self.pipeline.assignments
        notes = {
            name: "sends what is held back once, then changes method"
            for name, assignment in assignments.items()
            if isinstance(assignment.compressor, FlushCompressor)
        }
        return PlanReport(tuple(a.plan for a in assignments.values()), notes)

    def residual(self, name: str) -> Tensor:
        """What is held back of a parameter on this rank, in its shape; zeros if nothing is."""
        if name not in self._infos:
            raise UsageError(f"name is {name!r}; the handle knows {_some(self._infos)}")
        self.pipeline.settle()
        held = self.pipeline.held(name, "residual")
        return held if held is not None else torch.zeros(self._infos[name].shape)

    # -- changing it -------------------------------------------------------------------------------------------

    def switch(self, method: Method, *, policy: Sequence[Rule] | None = None) -> None:
        """Use another method from the next step on; every rank must call it at the same step.

        What is held back carries over, or is sent densely once where the new method has no place for it.
        """
        self._refuse_if_closed()
        rules = self._policy if policy is None else list(policy)
        check_settings(method, rules, False)
        plan = make_plan(self._infos.values(), method, rules, self.world)
        self._method, self._policy = method, rules
        self._agree(method)
        self.pipeline.switch(plan)

    def discard_step(self) -> None:
        """Say that the last step was not applied: what it sent returns to memory.

        Call it before the next backward, on every rank, when you skip `optimizer.step()` by a rule of your own.
        """
        self.pipeline.settle(discard=True)

    def close(self) -> None:
        """Stop compressing and free the memories; gradients are then averaged densely.

        What is still held back is dropped, with a warning. `switch(tw.Dense())` and one more step send it first.
        """
        if self.closed:
            return
        self.pipeline.settle()
        held = sum(m.nbytes() for m in self.pipeline.memories())
        if held:
            logger.warning(
                "close() drops %.1f MB of gradient that was held back; switch(tw.Dense()) and one more step "
                "would have sent it",
                held / 1e6,
            )
        self.closed = True
        for action in self._on_close:
            action()
        self.pipeline.driver.close()

    # -- saving it ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors and numbers, by parameter name."""
        self.pipeline.settle()
        return checkpoint.wrap_rank(self.rank, self.world, self.pipeline.state_dict())

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        on_world_change: str | None = None,
    ) -> None:
        """Restore this rank's state, or, from the states of all ranks of another world, its mean or nothing."""
        states = [state] if isinstance(state, Mapping) else list(state)
        content = checkpoint.pick_rank(states, self.rank, self.world, on_world_change)
        self.pipeline.load_state_dict(content)

    def load_checkpoint(self, path: str | Path, *, on_world_change: str | None = None) -> None:
        """Restore from a distributed checkpoint that holds a handle, saved with any number of ranks."""
        content = checkpoint.read_distributed(path, self.rank, self.world, on_world_change)
        self.pipeline.load_state_dict(content)

    # -- inside ------------------------------------------------------------------------------------------------

    def _agree(self, method: Method) -> None:
        settings = {"method": repr(method), "policy": "; ".join(map(str, self._policy))}
        for name, info in self._infos.items():
            settings[f"parameter {name}"] = f"{list(info.shape)} {list(info.strides)} {info.dtype}"
        agree(self._network_group, settings)

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise UsageError("the handle is closed; attach again to compress")


def check_settings(method: Any, policy: Any, deterministic: Any) -> None:
    check_instance("method", method, Method, "a method such as tw.ADTopK(density=0.01)")
    check_bool("deterministic", deterministic)
    for entry in policy or []:
        check_instance("policy", entry, Rule, "a list of tw.rule(...)")


def make_driver(
    process_group: dist.ProcessGroup, device: torch.device
) -> tuple[ThreadDriver | StreamDriver, Ledger]:
    """The driver that fits the device: side streams for CUDA, an ordered thread with its own group otherwise."""
    ledger = Ledger(dist.get_world_size(process_group))
    if device.type == "cuda":
        return StreamDriver(Network(process_group, ledger), device), ledger
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
