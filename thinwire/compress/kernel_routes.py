"""Kernel routes: memory -> select -> wire -> exchange as a few CUDA kernels.

The same as `PartsRoute` does with the parts, with the same bits: exact top-k by `FusedTopK`, selections above thresholds by
`FusedThreshold`. Both take the gradient from the bucket in the pass that selects, and write the update into it.

TopKRoute              residual + gradient, or momentum correction
ScaledTopKRoute        with Adam's momentum, chosen in Adam's scale
RefreshingTopKRoute    the same in a step in which the scale learns from the mean gradient first
ThresholdRoute         residual + gradient, chosen by thresholds
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from thinwire.compress.backends import Backend, SparseTask, register_backend
from thinwire.compress.base import CarryingRoute, GroupStep, Opened, Route
from thinwire.compress.kernel_accounts import TakeBackAccount
from thinwire.exchange.all_gather import GATHERED_PAYLOADS, AllGather
from thinwire.exchange.base import Outcome
from thinwire.exchange.common import ask
from thinwire.exchange.requests import Program, Sum, together
from thinwire.kernels.cuda.fused_estimate import FusedEstimate
from thinwire.kernels.cuda.fused_threshold import FusedThreshold, ThresholdState
from thinwire.kernels.cuda.fused_topk import FusedTopK, MomentumStep, ScaledStep
from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.prepared import PreparedKernels
from thinwire.kernels.cuda.quantize import Scaling
from thinwire.kernels.cuda.source import FLOAT_CODES
from thinwire.kernels.cuda.toolchain import has_kernels
from thinwire.kernels.inspection import drop_if_bad, inspect
from thinwire.layout import Group
from thinwire.memory.adam import SECOND_MOMENT
from thinwire.memory.base import CORRECTED, RESIDUAL, SCALED
from thinwire.memory.momentum import MomentumCorrection, accumulate
from thinwire.memory.store import Binding, Buffers
from thinwire.select.base import ABOVE_ESTIMATES, ABOVE_THRESHOLDS, LARGEST_OF_ROWS
from thinwire.select.finish import EstimateTurn, targets_of
from thinwire.select.threshold_reused import ThresholdTurn
from thinwire.wire.codec import Flags
from thinwire.wire.fixed import FIXED_WIDTH, PACKED_BITS
from thinwire.wire.floats import FLOATS


class KernelRoute(CarryingRoute):
    """What all kernels have in common: open memory, encode, gather, decode."""

    backend = "CUDA kernels"

    def __init__(self, task: SparseTask) -> None:
        super().__init__(task.group, task.slot_bytes, task.entries)
        assert isinstance(task.exchange, AllGather), "the form says that it gathers as one"
        self.task = task
        self.exchange = task.exchange
        self.gathered_bytes = sum(task.slot_bytes)
        stores = task.memory.stores
        self._residual, self._momentum = stores["residual"], stores.get("momentum")

    @cached_property
    def kernels(self) -> PreparedKernels:
        """Made at the first step: until then a companion may still come along."""
        return self._make()

    @abstractmethod
    def _make(self) -> PreparedKernels: ...

    @property
    def wrong(self) -> Tensor:
        return self.kernels.wrong

    def open(self, step: GroupStep) -> Opened:
        kernels, group = self.kernels, self.group
        residual = self._residual.bind(group)
        bindings = [residual]
        momentum: Sequence[Tensor] = ()
        if self._momentum is not None:
            u = self._momentum.bind(group)
            bindings.append(u)
            momentum = self._open_momentum(u.begin(step.scale), step)
        before, c, ratio = residual.begin(step.scale)
        sent = kernels.encode(step.bucket_flat, before, c, ratio, momentum)
        account = KernelAccount(c, bindings, kernels, sent, momentum)
        return Opened(self._run(account, step.bucket_flat), account)

    def _open_momentum(self, u: Buffers, step: GroupStep) -> list[Tensor]:
        """What kernels are told of the momentum in one step."""
        return self.kernels.open_momentum(*u)

    def _run(self, account: KernelAccount, bucket_flat: Tensor) -> Program[Outcome]:
        """AllGather's steps 2 to 4; slots no rank had a gradient for get no update and their entries return to memory."""
        kernels, sent, place = self.kernels, account.sent, self.task.terms.place
        assert sent is not None
        out = bucket_flat
        if not kernels.into_bucket:
            out = torch.zeros(self.group.numel, dtype=torch.float32, device=bucket_flat.device)
        control = self.task.codec.control_bytes
        if kernels.summed:
            dense = sent[: kernels.dense_prefix].view(torch.float32)
            payload = self.exchange.gather(
                kernels.payload(sent), place, phase="sparse", control_bytes=control
            )
            sums, gathered = yield from together([ask(Sum(dense, "dense")), payload])
            kernels.decode(gathered, out, sums)
        else:
            phase = "dense+sparse" if kernels.dense_prefix else "sparse"
            gathered = yield from self.exchange.gather(
                sent, place, phase=phase, control_bytes=control
            )
            kernels.decode(gathered, out)
        account.arrive()
        return Outcome(out, kernels.wrong, delivered=kernels.into_bucket)


class TopKRoute(KernelRoute):
    """Exact top-k of every row."""

    def __init__(
        self, task: SparseTask, companion: Group | None = None, summed: bool = False
    ) -> None:
        super().__init__(task)
        self._companion = companion
        self._summed = summed

    def _make(self) -> PreparedKernels:
        task = self.task
        return FusedTopK(
            self.group,
            task.codec,
            task.terms.gradient_dtype,
            task.terms.place.world,
            self._correction,
            self._companion,
            self._summed,
        )

    @property
    def _correction(self) -> MomentumStep | None:
        return self.task.memory.setting.correction

    def carrying(self, companion: Group, *, summed: bool) -> CarryingRoute | None:
        return type(self)(self.task, companion, summed)


class ScaledTopKRoute(TopKRoute):
    """Exact top-k of every row in units of sqrt(v) + eps."""

    @property
    def _scaling(self) -> Scaling:
        scaling = self.task.memory.setting.scaling
        assert scaling is not None, "the form says so"
        return scaling

    @property
    def _correction(self) -> MomentumStep | None:
        return ScaledStep(self._scaling)

    def _open_momentum(self, u: Buffers, step: GroupStep) -> list[Tensor]:
        v = self.task.memory.stores[SECOND_MOMENT].bind(self.group).flat
        return [*super()._open_momentum(u, step), *self.kernels.open_scale(v, step.scale)]


class RefreshingTopKRoute(ScaledTopKRoute):
    """Torch collects c first. Kernels choose from it when the mean gradient has changed v."""

    def __init__(
        self, task: SparseTask, companion: Group | None = None, summed: bool = False
    ) -> None:
        super().__init__(task, companion, summed)
        self.objection = task.mean_gradient.objection

    @property
    def _correction(self) -> MomentumStep | None:
        return ScaledStep(self._scaling, collected=True)

    def open(self, step: GroupStep) -> Opened:
        group, beta = self.group, self._scaling.beta
        flags, gradients = inspect(group, step.bucket_flat)
        assert self._momentum is not None, "the form says so"
        bindings = [store.bind(group) for store in (self._residual, self._momentum)]
        c, u = (binding.begin(step.scale) for binding in bindings)
        plain = MomentumCorrection(beta, nesterov=False, masking=False)
        accumulate(u, c, group, gradients, plain, gain=1 - beta)
        # Where it overflows c does too, which tells of it.
        torch.nan_to_num(u.now, 0.0, 0.0, 0.0, out=u.now)
        account = KernelAccount(c.now, bindings, self.kernels, None, [u.now, u.now])
        return Opened(self._refresh(account, flags, gradients, step), account)

    def _refresh(
        self, account: KernelAccount, flags: Flags, gradients: Sequence[Tensor], step: GroupStep
    ) -> Program[Outcome]:
        task, kernels, c = self.task, self.kernels, account.c
        flags = yield from task.mean_gradient.run(gradients, flags, step.counts, step.scale)
        u = account.momentum[1]
        account.momentum = self._open_momentum(Buffers(u, u, None), step)
        sent = kernels.encode(step.bucket_flat, c, c, None, account.momentum)
        # The first look took what is not finite out of the bucket.
        task.codec.raise_non_finite(kernels.payload(sent), flags.non_finite)
        account.sent = sent
        outcome: Outcome = yield from self._run(account, step.bucket_flat)
        return outcome


def make_top_k_route(task: SparseTask) -> Route:
    if task.memory.setting.scaling is None:
        return TopKRoute(task)
    return RefreshingTopKRoute(task) if task.mean_gradient.due else ScaledTopKRoute(task)


class ThresholdRoute(KernelRoute):
    """Everything above a threshold of each slot; the selection learns from all headers."""

    def __init__(self, task: SparseTask) -> None:
        super().__init__(task)
        assert isinstance(task.selection, ThresholdTurn), "the form says so"
        self.turn = task.selection
        self._names = [slot.name for slot in task.group.slots]

    def _make(self) -> PreparedKernels:
        task = self.task
        goals = self.turn.goals(task.codec.table)
        return FusedThreshold(
            self.group, task.codec, self._state(), goals, task.terms.gradient_dtype
        )

    def _state(self) -> ThresholdState:
        task, group = self.task, self.group
        state = task.shared.get("thresholds")
        if not isinstance(state, ThresholdState):
            # Thresholds and room to work in are the same in all modes.
            entries, world = self.turn.usual_entries(group.slots), task.terms.place.world
            state = ThresholdState(group, entries, world, self.turn.tolerance)
            state.thresholds.fill_(self.turn.first_threshold)
            task.shared["thresholds"] = state
        return state

    def open(self, step: GroupStep) -> Opened:
        kernels = self.kernels
        assert isinstance(kernels, FusedThreshold)
        self.turn.share_thresholds(self._names, kernels.state.threshold_views)
        self.turn.note_thresholds(kernels.state.thresholds)
        opened = super().open(step)
        return replace(opened, program=self._learn(kernels, opened.program))

    def _learn(self, kernels: FusedThreshold, program: Program[Outcome]) -> Program[Outcome]:
        outcome = yield from program
        counts, notes = kernels.take_slot_words()
        self.turn.observe(self.task.codec.table, notes, counts)
        return replace(outcome, sent=counts[self.task.terms.place.rank])


class EstimateRoute(ThresholdRoute):
    """Everything above a threshold of each slot that is estimated in the same step."""

    def _make(self) -> PreparedKernels:
        task, turn = self.task, self.turn
        assert isinstance(turn, EstimateTurn), "the form says so"
        table = task.codec.table
        return FusedEstimate(
            self.group,
            task.codec,
            self._state(),
            turn.goals(table),
            task.terms.gradient_dtype,
            targets_of(table, self.group.device),
            partial(turn.estimate, table=table),
        )


class KernelAccount(TakeBackAccount):
    """What was sent is known by its payload alone."""

    def __init__(
        self,
        c: Tensor,
        bindings: Sequence[Binding],
        kernels: PreparedKernels,
        sent: Tensor | None,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(c, bindings, kernels, momentum)
        self.kernels = kernels
        self.sent = sent
        """The buffer that the payload is in; None before anything is sent."""

    def _joint_entry(self, used: Tensor) -> Joint | None:
        if self.sent is None:
            return None
        return self.kernels.joint_entry(self.c, self.sent, used, self._unused, self.momentum)

    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        if self.sent is None:
            drop_if_bad(self.c, bad)
            return
        self.kernels.give_back(self.c, self.sent, used, bad, self._unused, self.momentum)

    def accepted(self) -> Tensor:
        codec = self.kernels.codec
        total = torch.zeros(codec.table.numel, dtype=self.c.dtype, device=self.c.device)
        if self.sent is None:
            return total
        positions, values = codec.decode(self.kernels.payload(self.sent))
        if self.used is not None:
            # So that c and what was accepted are together what memory handed out.
            self._return_unused()
            taken = self.used[codec.table.entry_slots(values.device).long()].bool()
            values = torch.where(taken, values, 0.0)
        return total.index_add_(0, positions, values.to(total.dtype))


TOP_K_KERNELS = Backend(
    "kernels for exact top-k",
    selections={LARGEST_OF_ROWS},
    memories={RESIDUAL, CORRECTED, SCALED},
    values={FLOATS},
    indices={FIXED_WIDTH, PACKED_BITS},
    exchanges={GATHERED_PAYLOADS},
    gradients=set(FLOAT_CODES),
    serves=has_kernels,
    route=make_top_k_route,
)
THRESHOLD_KERNELS = replace(
    TOP_K_KERNELS,
    name="kernels for thresholds",
    selections={ABOVE_THRESHOLDS},
    memories={RESIDUAL},
    route=ThresholdRoute,
)
ESTIMATE_KERNELS = replace(
    THRESHOLD_KERNELS,
    name="kernels for estimated thresholds",
    selections={ABOVE_ESTIMATES},
    route=EstimateRoute,
)
register_backend(TOP_K_KERNELS)
register_backend(THRESHOLD_KERNELS)
register_backend(ESTIMATE_KERNELS)
