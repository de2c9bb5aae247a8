"""Convergence: the constant xi that the analysis of sparsified SGD assumes to be bounded, and the rows that get nothing.

With T the selection, c_w what worker w has to send (gradient plus what it held back) and g_w its gradient:

    xi = || T(mean of c_w) - mean of T(c_w) || / || mean of g_w ||

per layer, averaged over the layers that are compressed. It says how far the mean of what the workers select is from what
one would select who knew all of them (Alistarh et al., "The Convergence of Sparsified Gradient Methods", 2018). The learning
rate cancels.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.adapters.simulate import Simulation
from thinwire.errors import UsageError
from thinwire.kernels.topk import row_topk
from thinwire.methods.base import SMALL_NUMEL, SparseMethod
from thinwire.plan.policy import rule
from thinwire.recipes.parallel import Attachment, Replica
from thinwire.recipes.simulated import SimulatedReplica, SimulatedWorkers
from thinwire.recipes.step import Step
from thinwire.select.rows import SlotRows
from thinwire.select.topk import ExactTopK

LOOK_AT = 1
"""Which step of every epoch is looked at: the second, as published; the only one of shorter epochs."""


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
def measure_xi(simulation: Simulation, scale: float = 1.0) -> dict[str, float]:
    """xi of every compressed layer, between the workers' backward passes and `exchange`.

    `scale` is what the gradients are multiplied with, under a GradScaler.
    """
    found: dict[str, float] = {}
    for slot_plan in simulation.plan():
        method, name = slot_plan.method, slot_plan.info.name
        if not isinstance(method, SparseMethod):
            continue
        selector = method.selector()
        if not isinstance(selector, ExactTopK):
            raise UsageError(
                f"method is {type(method).__name__}, which does not select by an exact top-k; xi is defined for tw.TopK and tw.ADTopK"
            )
        slot = slot_plan.info.slot(0)
        rows = selector.rows(slot, None)
        total = selected = gradients = torch.zeros(slot.numel, device=simulation.device)
        for rank in simulation.ranks:
            gradient = _in_memory_order(rows, simulation.gradient(name, rank) / scale)
            compensated = gradient + _in_memory_order(rows, simulation.residual(name, rank))
            total = total + compensated
            selected = selected + select(rows, compensated)
            gradients = gradients + gradient
        # Of sums instead of means: the number of workers cancels, because selection does not look at the scale.
        norm = float(gradients.norm())
        if norm > 0:
            found[name] = float((select(rows, total) - selected).norm()) / norm
    return found


def select(rows: SlotRows, flat: Tensor) -> Tensor:
    """T: what an exact selection in these rows keeps, zeros elsewhere."""
    kept = torch.zeros_like(flat)
    indices = row_topk(rows.matrix(flat), rows.keep)
    rows.matrix(kept).scatter_(-1, indices, rows.matrix(flat).gather(-1, indices))
    return kept


def _in_memory_order(rows: SlotRows, values: Tensor) -> Tensor:
    flat = torch.empty(rows.slot.numel, device=values.device)
    rows.slot.view(flat).copy_(values)
    return flat


# -- looking while a recipe trains -----------------------------------------------------------------------------


class WatchedWorkers(SimulatedWorkers):
    """Simulated workers that are looked at once per epoch.

    Under `small_dense` small layers travel dense, also where the method would not let them.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        steps_per_epoch: int,
        *,
        small_dense: bool = False,
    ) -> None:
        super().__init__(count, device)
        self.small_dense = small_dense
        self.look_at = min(LOOK_AT, steps_per_epoch - 1)
        self.looks: list[Look] = []

    def put_to_work(self, attachment: Attachment) -> Replica:
        return WatchedReplica(attachment, self)


class WatchedReplica(SimulatedReplica):
    def __init__(self, attachment: Attachment, workers: WatchedWorkers) -> None:
        is_small = [p.numel() < SMALL_NUMEL for p in attachment.model.parameters()]
        # A rule that nothing matches would be reported as a mistake.
        wanted = workers.small_dense and any(is_small)
        policy = [rule(max_numel=SMALL_NUMEL - 1, dense=True)] if wanted else []
        super().__init__(attachment, workers, policy)
        plan = list(self.simulation.plan())
        if not any(isinstance(one.method, SparseMethod) for one in plan):
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
                rows=sum(one.rows for one in counted),
                empty_as_sent=sum(one.empty_as_sent for one in counted),
                empty_all_dimension=sum(one.empty_all_dimension for one in counted),
                empty_global=sum(one.empty_global for one in counted),
            )
        )
