"""Agreed routes: kernels from the gradient to the update, for exchanges that agree on places and add what is there.

How ranks agree is the exchange's own torch code; it works on entries, of which there are a hundredth of the elements.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from thinwire.compress.backends import SparseTask, register_backend
from thinwire.compress.base import GroupStep, Opened, Route
from thinwire.compress.kernel_accounts import TakeBackAccount
from thinwire.compress.kernel_routes import TOP_K_KERNELS
from thinwire.exchange.agreed import (
    AGREED_PLACES,
    AgreedPlaces,
    Told,
    ask_flags,
    known,
    message_places,
    sums_by_owner,
)
from thinwire.exchange.base import Offer, Outcome
from thinwire.exchange.common import ask, wire_dtype
from thinwire.exchange.requests import Program, Sum, together
from thinwire.exchange.sums import ask_owners
from thinwire.kernels.cuda.agreed import AgreedKernels, AgreedSent
from thinwire.kernels.cuda.entries import MemoryKernel
from thinwire.kernels.cuda.joint import Joint
from thinwire.memory.account import Account
from thinwire.memory.base import RESIDUAL
from thinwire.memory.storage import PackedAccount
from thinwire.memory.store import Binding
from thinwire.select.base import LARGEST_OF_ROWS, RANDOM_PLACES, WHOLE_CHUNKS


def agreed_route(task: SparseTask) -> Route:
    """All by kernels; memory alone where there is nobody to exchange with."""
    return LoneRoute(task) if task.terms.place.world == 1 else AgreedRoute(task)


class LoneRoute(Route):
    """1. A kernel adds gradient and memory, and looks at both.
    2. The exchange, of one rank, runs in torch.
    """

    backend = "CUDA kernels, then torch"

    def __init__(self, task: SparseTask) -> None:
        super().__init__(task.group, task.slot_bytes, task.entries)
        self.task = task
        self.gathered_bytes, self.gathered_after = task.gathered()

    @cached_property
    def memory_kernel(self) -> MemoryKernel:
        return MemoryKernel(self.group, self.task.terms.gradient_dtype)

    def open(self, step: GroupStep) -> Opened:
        binding = self.task.memory.stores["residual"].bind(self.group)
        before, c, ratio = binding.begin(step.scale)
        flags = self.memory_kernel.open(step.bucket_flat, before, c, ratio)
        offer = Offer(
            self._account(c, binding),
            self.task.selection,
            self.task.codec,
            flags,
            self.task.terms.place,
            phase="sparse",
            counts=step.counts,
        )
        return Opened(self._run(offer, step.bucket_flat), offer.account)

    def _account(self, c: Tensor, binding: Binding) -> Account:
        return Account(c) if c is binding.flat else PackedAccount(c, binding)

    def _run(self, offer: Offer, bucket_flat: Tensor) -> Program[Outcome]:
        outcome: Outcome = yield from self.task.exchange.run(offer)
        offer.account.rest()
        return outcome


class AgreedRoute(LoneRoute):
    """1. A kernel adds gradient and memory, and looks at both.
    2. The exchange agrees on places.
    3. A kernel takes out what is there, another adds up what this rank owns, and one writes the mean into the bucket.
    """

    backend = "CUDA kernels"

    @cached_property
    def kernels(self) -> AgreedKernels:
        terms, wire = self.task.terms, self.task.codec.values.dtype
        assert wire is not None, "the form says that values are floats"
        into_bucket = terms.gradient_dtype == torch.float32
        place = terms.place
        return AgreedKernels(self.group, wire, place.rank, place.world, into_bucket=into_bucket)

    def _account(self, c: Tensor, binding: Binding) -> Account:
        return AgreedAccount(c, binding, self.kernels)

    def _run(self, offer: Offer, bucket_flat: Tensor) -> Program[Outcome]:
        exchange, account, kernels = self.task.exchange, offer.account, self.kernels
        assert isinstance(exchange, AgreedPlaces), "the form says so"
        assert isinstance(account, AgreedAccount)
        agreed = yield from exchange.agree(offer)
        places, told = agreed if isinstance(agreed, tuple) else (agreed, None)
        account.sent = sent = kernels.take(account.c, message_places(offer, places))
        flags: Program[Told] = known(told) if told else ask_flags(offer)
        (used, non_finite), summed = yield from together([flags, self._sum(offer, sent)])
        out = kernels.deliver(summed, sent, used, account.c, bucket_flat)
        account.arrive()
        wrong = non_finite | kernels.wrong
        return Outcome(out, wrong, sent=sent.counts, delivered=kernels.into_bucket)

    def _sum(self, offer: Offer, sent: AgreedSent) -> Program[Tensor]:
        """All ranks' values, by owners or by one all-reduce, as `contribute` asks for them."""
        phase, size, world = f"{offer.phase}/values", wire_dtype(offer).itemsize, self.kernels.world
        if not sums_by_owner(offer):
            padding = sent.stats[0] * size
            summed: Tensor = yield from ask(
                Sum(sent.message.view(-1), phase, padding_bytes=padding)
            )
            return summed
        summed, _ = yield from ask_owners(
            sent.message,
            phase,
            partial(self.kernels.add_up, sent=sent),
            padding_bytes=sent.stats[0] * (size * world / (world - 1)),
            own_padding_bytes=sent.stats[1] * size,
        )
        return summed


class AgreedAccount(TakeBackAccount):
    """What was sent is known by its places and codes."""

    def __init__(self, c: Tensor, binding: Binding, kernels: AgreedKernels) -> None:
        super().__init__(c, [binding], kernels)
        self.sent: AgreedSent | None = None
        self._kernels = kernels

    def _joint_entry(self, used: Tensor) -> Joint | None:
        return None if self.sent is None else self._kernels.joint_entry(self.c, self.sent)

    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        if self.sent is not None:
            self._kernels.give_back(self.c, self.sent, bad)

    def accepted(self) -> Tensor:
        total = torch.zeros(self._kernels.group.numel, device=self._kernels.group.device)
        if self.sent is not None:
            self._kernels.add_accepted(self.sent, total)
        return total


AGREEING_KERNELS = replace(
    TOP_K_KERNELS,
    name="kernels for agreed places",
    selections={LARGEST_OF_ROWS, RANDOM_PLACES, WHOLE_CHUNKS},
    memories={RESIDUAL},
    exchanges={AGREED_PLACES},
    route=agreed_route,
)
register_backend(AGREEING_KERNELS)
