"""DenseCompressor: tensors that travel whole, by a sum of their own or together with what is gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.compress.base import (
    CarryingRoute,
    Compressor,
    GroupPlan,
    GroupStep,
    Opened,
    Route,
    Terms,
)
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Gather, Program, Request, Sum
from thinwire.exchange.sums import dense_mean, divide
from thinwire.kernels.cuda.dense import FusedDense
from thinwire.kernels.cuda.toolchain import has_kernels
from thinwire.kernels.inspection import inspect
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import Stores
from thinwire.memory.clip import Clip

SMALL_BESIDE = 8
"""Dense tensors are gathered with payloads of at least this many times their bytes. That costs half the number of ranks
more than a sum on the way, as it does for the payloads; a collective of its own costs its latency and the host's time."""


class AfterMean(ABC):
    """What is done with the mean of dense tensors before it is delivered."""

    memory: Stores | None = None
    takes_delivered: bool = False
    """Whether it also works on means that kernels have left in the bucket."""

    @abstractmethod
    def begin(self, group: Group, scale: Tensor | None) -> MeanStep:
        """Begin one step of a group."""


class MeanStep(ABC):
    """One step of what comes after the mean of a group."""

    account: Account | None = None

    @abstractmethod
    def finish(self, outcome: Outcome) -> Outcome: ...


class DenseCompressor(Compressor):
    """The plain mean, optionally in a narrower dtype on the wire, of clipped gradients, or with something after it."""

    travels_whole = True

    def __init__(
        self,
        wire_dtype: torch.dtype | None,
        after: AfterMean | None = None,
        clip: Clip | None = None,
    ) -> None:
        self.wire_dtype = wire_dtype
        self.after = after
        self.clip = clip
        self.memory = after.memory if after is not None else None

    def working_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        wide = super().working_dtype(gradient_dtype)
        return gradient_dtype if self.memory is None else wide

    def shared_state(self, name: str) -> dict[str, Tensor]:
        stores = self.memory.stores if self.memory is not None else {}
        held = {store: contents.read(name) for store, contents in stores.items()}
        return {store: values for store, values in held.items() if values is not None}

    def load_shared_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        for store, values in state.items():
            assert self.memory is not None
            self.memory.stores[store].write(name, values)

    def plan(self, group: Group, terms: Terms) -> DensePlan:
        return DensePlan(self, group, terms)


class DensePlan(GroupPlan):
    """A dense group. How it travels depends on what else the bucket sends."""

    def __init__(self, compressor: DenseCompressor, group: Group, terms: Terms) -> None:
        super().__init__(group)
        self.compressor = compressor
        self.terms = terms
        wire = compressor.wire_dtype or terms.gradient_dtype
        after = compressor.after
        self._plain = (
            wire == terms.gradient_dtype == torch.float32
            and compressor.clip is None
            and (after is None or after.takes_delivered)
        )
        """Whether the gradients may travel just as they lie in the bucket."""
        self._kernels = self._plain and has_kernels(group.device)

    def route(self, modes: Hashable) -> Route:
        return self._own_route(gathered=False)

    def join(self, modes: Hashable, others: Sequence[Route]) -> list[Route]:
        """1. Kernels of a single other group take it along, in their launches and buffers.
        2. Where it is small it is gathered with the payloads.
        3. Otherwise it is summed by itself.
        """
        world = self.terms.place.world
        payload = sum(route.gathered_bytes for route in others) / max(1, world - 1)
        small = SMALL_BESIDE * 4 * self.group.numel <= payload
        if self._kernels and len(others) == 1 and world > 1:
            carrier = others[0].carrying(self.group, summed=not small)
            if carrier is not None:
                return [CarriedRoute(self, carrier, gathered=small), carrier]
        after = max((route.gathered_after for route in others if route.gathered_bytes), default=0)
        gathered = self._plain and small and world > 1
        return [self._own_route(gathered=gathered, after=after), *others]

    def _own_route(self, *, gathered: bool, after: int = 0) -> Route:
        if self._kernels and self.terms.place.world > 1:
            return DenseKernelRoute(self, gathered=gathered, after=after)
        return GatheredDenseRoute(self, after=after) if gathered else DenseRoute(self)


class DenseRoute(Route):
    """The mean by one sum, in torch."""

    compressed = False

    def __init__(self, plan: DensePlan, *, gathered: bool = False) -> None:
        self.place = plan.terms.place
        compressor = plan.compressor
        self.wire_dtype = compressor.wire_dtype or plan.terms.gradient_dtype
        self.after, self.clip = compressor.after, compressor.clip
        world = self.place.world
        share = world - 1 if gathered else 2 * (world - 1) / world
        entries = [slot.numel for slot in plan.group.slots]
        per_element = share * self.wire_dtype.itemsize
        super().__init__(plan.group, [per_element * numel for numel in entries], entries)
        self._never = torch.zeros((), dtype=torch.bool, device=plan.group.device)

    def open(self, step: GroupStep) -> Opened:
        program = self._run(step)
        if self.after is None:
            return Opened(program)
        after = self.after.begin(self.group, step.scale)
        return Opened(program, after.account, after.finish)

    def _run(self, step: GroupStep) -> Program[Outcome]:
        buffer = torch.zeros(self.group.numel, dtype=self.wire_dtype, device=self.group.device)
        self._fill(buffer, step)
        mean = yield from dense_mean(buffer, self.place, phase="dense")
        return Outcome(mean, self._never)

    def _fill(self, buffer: Tensor, step: GroupStep) -> None:
        """Nobody has to look first: what is not finite travels by the sum, and every rank sees it there."""
        spans = self.group.spans(buffer)
        if self.clip is None:
            torch._foreach_copy_(spans, self.group.pieces(step.bucket_flat))
            return
        flags, gradients = inspect(self.group, step.bucket_flat)
        torch._foreach_copy_(spans, self.clip.apply(gradients, step.scale, self.place.world))
        # What was not finite has been set to zero; a NaN in its place travels by the sum.
        buffer[:1] += torch.where(flags.non_finite, torch.nan, 0.0)


def let_pass(rounds: int) -> Program[None]:
    """Ask for nothing in so many rounds, so that what is asked for then travels with what others ask for."""
    for _ in range(rounds):
        yield ()


class GatheredDenseRoute(DenseRoute):
    """The mean out of every rank's tensors, gathered with the payloads and summed in rank order."""

    def __init__(self, plan: DensePlan, *, after: int) -> None:
        super().__init__(plan, gathered=True)
        self.after_rounds = after

    def _run(self, step: GroupStep) -> Program[Outcome]:
        group = self.group
        # Whole words of 16 bytes, behind which a payload stays aligned.
        buffer = torch.zeros(-(-group.numel // 4) * 4, device=group.device)
        self._fill(buffer, step)
        # Each part is divided before it is added, as in `dense_mean`.
        payload = divide(buffer, self.place.world).view(torch.uint8)
        yield from let_pass(self.after_rounds)
        (gathered,) = yield (Gather(payload, "dense", apart=True),)
        first, *others = gathered.view(torch.float32)
        total = first.clone()
        for other in others:
            total += other
        return Outcome(total[: group.numel], self._never)


class DenseKernelRoute(DenseRoute):
    """The same by kernels, one before the sum or the gathering and one after it."""

    backend = "CUDA kernels"

    def __init__(self, plan: DensePlan, *, gathered: bool, after: int = 0) -> None:
        super().__init__(plan, gathered=gathered)
        self.gathered = gathered
        self.after_rounds = after if gathered else 0
        self.kernels = FusedDense(self.group, self.place.world)

    def _run(self, step: GroupStep) -> Program[Outcome]:
        """The reply is what every rank sent, or the one row of their sum."""
        kernels, flat = self.kernels, step.bucket_flat
        packed = kernels.send(flat)
        yield from let_pass(self.after_rounds)
        request: Request = Sum(packed.view(torch.float32), "dense")
        if self.gathered:
            request = Gather(packed, "dense", apart=True)
        (reply,) = yield (request,)
        kernels.mean(torch.atleast_2d(reply), flat)
        return Outcome(flat, kernels.wrong, delivered=True)


class CarriedRoute(DenseRoute):
    """A group that the kernels of another one take along: nothing is left to do but what comes after the mean."""

    backend = "CUDA kernels"

    def __init__(self, plan: DensePlan, carrier: CarryingRoute, *, gathered: bool) -> None:
        super().__init__(plan, gathered=gathered)
        self.carrier = carrier

    def _run(self, step: GroupStep) -> Program[Outcome]:
        yield from ()
        return Outcome(step.bucket_flat, self.carrier.wrong, delivered=True)
