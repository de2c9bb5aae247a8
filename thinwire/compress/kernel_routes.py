"""Kernel routes: memory -> select -> wire -> exchange as a few CUDA kernels.

The same as `PartsRoute` does with the parts, with the same bits: exact top-k by `FusedTopK`, selections above thresholds by
`FusedThreshold`. Both take the gradient from the bucket in the pass that selects, and write the update into it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from thinwire.compress.backends import Backend, SparseTask, register_backend
from thinwire.compress.base import CarryingRoute, GroupStep, Opened
from thinwire.compress.kernel_accounts import TakeBackAccount
from thinwire.exchange.all_gather import GATHERED_PAYLOADS, AllGather
from thinwire.exchange.base import Outcome
from thinwire.exchange.common import ask
from thinwire.exchange.requests import Program, Sum, together
from thinwire.kernels.cuda.fused_estimate import FusedEstimate
from thinwire.kernels.cuda.fused_threshold import FusedThreshold, ThresholdState
from thinwire.kernels.cuda.fused_topk import FusedTopK
from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.prepared import PreparedKernels
from thinwire.kernels.cuda.source import FLOAT_CODES
from thinwire.kernels.cuda.toolchain import has_kernels
from thinwire.layout import Group
from thinwire.memory.base import CORRECTED, RESIDUAL
from thinwire.memory.store import Binding
from thinwire.select.base import ABOVE_ESTIMATES, ABOVE_THRESHOLDS, LARGEST_OF_ROWS
from thinwire.select.finish import EstimateTurn, targets_of
from thinwire.select.threshold_reused import ThresholdTurn
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
            momentum = kernels.open_momentum(*u.begin(step.scale))
        before, c, ratio = residual.begin(step.scale)
        sent = kernels.encode(step.bucket_flat, before, c, ratio, momentum)
        account = KernelAccount(c, bindings, kernels, sent, momentum)
        return Opened(self._run(account, step.bucket_flat), account)

    def _run(self, account: KernelAccount, bucket_flat: Tensor) -> Program[Outcome]:
        """AllGather's steps 2 to 4; slots no rank had a gradient for get no update and their entries return to memory."""
        kernels, sent, place = self.kernels, account.sent, self.task.terms.place
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
            task.memory.setting.correction,
            self._companion,
            self._summed,
        )

    def carrying(self, companion: Group, *, summed: bool) -> CarryingRoute | None:
        return TopKRoute(self.task, companion, summed)


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
        sent: Tensor,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(c, bindings, kernels, momentum)
        self.kernels = kernels
        self.sent = sent
        """The buffer that the payload is in."""

    @property
    def payload(self) -> Tensor:
        return self.kernels.payload(self.sent)

    def _joint_entry(self, used: Tensor) -> Joint | None:
        return self.kernels.joint_entry(self.c, self.sent, used, self._unused, self.momentum)

    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        self.kernels.give_back(self.c, self.sent, used, bad, self._unused, self.momentum)

    def accepted(self) -> Tensor:
        codec = self.kernels.codec
        positions, values = codec.decode(self.payload)
        if self.used is not None:
            # So that c and what was accepted are together what memory handed out.
            self._return_unused()
            taken = self.used[codec.table.entry_slots(values.device).long()].bool()
            values = torch.where(taken, values, 0.0)
        total = torch.zeros(self.kernels.group.numel, dtype=self.c.dtype, device=values.device)
        return total.index_add_(0, positions, values.to(total.dtype))


TOP_K_KERNELS = Backend(
    "kernels for exact top-k",
    selections={LARGEST_OF_ROWS},
    memories={RESIDUAL, CORRECTED},
    values={FLOATS},
    indices={FIXED_WIDTH, PACKED_BITS},
    exchanges={GATHERED_PAYLOADS},
    gradients=set(FLOAT_CODES),
    serves=has_kernels,
    route=TopKRoute,
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
