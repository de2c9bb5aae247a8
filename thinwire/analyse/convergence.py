"""Convergence: the constant xi that the analysis of sparsified SGD assumes to be bounded, and the rows that get nothing.

With T the selection, c_w what worker w has to send (gradient plus what it held back) and g_w its gradient:

    xi = || T(mean of c_w) - mean of T(c_w) || / || mean of g_w ||

per layer, averaged over the layers that are compressed. Each worker selects by what it has. xi says how far the mean of that is from
the selection of somebody who has the mean of all (Alistarh et al., "The Convergence of Sparsified Gradient Methods", 2018). The
learning rate cancels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.layout import RowTable, Slot
from thinwire.methods import SMALL_NUMEL
from thinwire.recipes.parallel import Attachment, Replica
from thinwire.recipes.simulated import SimulatedReplica, SimulatedWorkers
from thinwire.recipes.step import Step

LOOK_AT = 1
"""Which step of every epoch is looked at: the second, as published; the only one of shorter epochs."""
COUNTED = ("rows", "empty_as_sent", "empty_all_dimension", "empty_global")
"""What is added up over the layers."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """One step of one epoch."""

    epoch: int
    """From 1."""
    xi: float
    layers: dict[str, float]
    """xi of every compressed layer."""
    rows: int
    """Of all compressed layers."""
    empty_as_sent: int
    """Rows of which worker 0 sent nothing."""
    empty_all_dimension: int
    """Those of which all-dimension top-k would have sent nothing."""
    empty_global: int
    """And those of which global top-k would have."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_xi(simulation: tw.Simulation, scale: float = 1.0) -> dict[str, float]:
    """xi of every compressed layer, between the workers' backward passes and `exchange`.

    `scale` is what the gradients are multiplied with, under a GradScaler.
    """
    found: dict[str, float] = {}
    for slot_plan in simulation.plan():
        method, name = slot_plan.method, slot_plan.info.name
        if slot_plan.dense:
            continue
        if not method.selects or method.takes_over is not None:
            raise UsageError(
                f"method is {type(method).__name__}, for which there is no xi; it must choose entries of gradients without "
                "momentum, as tw.TopK and tw.ADTopK do"
            )
        slot = slot_plan.info.slot(0)
        select = first_selection(method, slot)
        total = selected = gradients = torch.zeros(slot.numel, device=simulation.device)
        for rank in simulation.ranks:
            gradient = _in_memory_order(slot, simulation.gradient(name, rank) / scale)
            compensated = gradient + _in_memory_order(slot, simulation.residual(name, rank))
            total = total + compensated
            selected = selected + select(compensated)
            gradients = gradients + gradient
        workers, norm = len(simulation.ranks), float(gradients.norm())
        if norm > 0:
            apart = select(total / workers) - selected / workers
            found[name] = float(apart.norm()) * workers / norm
    return found


def first_selection(method: Any, slot: Slot) -> Callable[[Tensor], Tensor]:
    """T: what the method keeps of a slot, zeros elsewhere. One that learns from step to step chooses as in its first."""
    session = method.selector().session()
    turn = session.turn(session.begin([slot.name], [0]))
    table = RowTable([turn.rows(0, slot)], slot.numel)

    def select(flat: Tensor) -> Tensor:
        picks = turn.pick(flat, table)
        # Places that are left over add 0.
        return torch.zeros_like(flat).index_add_(0, table.positions(picks.indices), picks.values)

    return select


def _in_memory_order(slot: Slot, values: Tensor) -> Tensor:
    flat = torch.empty(slot.numel, device=values.device)
    slot.view(flat).copy_(values)
    return flat


# -- looking while a recipe trains -----------------------------------------------------------------------------


class WatchedWorkers(SimulatedWorkers):
    """Simulated workers that are looked at once per epoch.

    Under `small_dense` small layers travel dense, also where the method would not let them.
    """

    def __init__(
        self, count: int, device: torch.device, steps_per_epoch: int, *, small_dense: bool = False
    ) -> None:
        super().__init__(count, device)
        self.small_dense = small_dense
        self.look_at = min(LOOK_AT, steps_per_epoch - 1)
        self.looks: list[Look] = []

    def attach(self, attachment: Attachment) -> Replica:
        return WatchedReplica(attachment, self)


class WatchedReplica(SimulatedReplica):
    def __init__(self, attachment: Attachment, workers: WatchedWorkers) -> None:
        is_small = [p.numel() < SMALL_NUMEL for p in attachment.model.parameters()]
        # A rule that nothing matches would be reported as a mistake.
        wanted = workers.small_dense and any(is_small)
        policy = [tw.rule(max_numel=SMALL_NUMEL - 1, dense=True)] if wanted else []
        super().__init__(attachment, workers, policy)
        plan = list(self.simulation.plan())
        if all(one.dense for one in plan):
            largest = max(plan, key=lambda one: one.info.numel)
            forced = workers.small_dense or largest.info.numel < SMALL_NUMEL
            hint = "" if forced else " (--no-break-even compresses it all the same)"
            raise UsageError(
                f"no layer is compressed, so there is no xi; {largest.info.name}, the largest, is dense "
                f"because: {largest.reason}{hint}"
            )
        self._look_at = workers.look_at
        self._looks = workers.looks

    def exchange(self, step: Step) -> None:
        if step.number != self._look_at:
            super().exchange(step)
            return
        layers = measure_xi(self.simulation, step.precision.scaler.get_scale())
        super().exchange(step)
        counted = (self.simulation.stats(dimensions=True).dimensions or {}).values()
        self._looks.append(
            Look(
                epoch=step.epoch + 1,
                xi=statistics.fmean(layers.values()) if layers else 0.0,
                layers=layers,
                **{name: sum(getattr(one, name) for one in counted) for name in COUNTED},
            )
        )
