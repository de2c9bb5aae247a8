"""Agreed routes: memory in one pass and the update by kernels, for exchanges that agree on places and add what is there."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from thinwire.compress.backends import SparseTask, register_backend
from thinwire.compress.base import GroupStep, Opened, Route
from thinwire.compress.delivery import BucketDelivery
from thinwire.compress.kernel_routes import TOP_K_KERNELS
from thinwire.exchange.agreed import AGREED_PLACES
from thinwire.exchange.base import Offer, Outcome
from thinwire.exchange.requests import Program
from thinwire.kernels.cuda.entries import MemoryKernel
from thinwire.memory.account import Account
from thinwire.memory.base import RESIDUAL
from thinwire.memory.storage import PackedAccount


class AgreedRoute(Route):
    """1. A kernel adds gradient and memory, and looks at both.
    2. The exchange runs: ranks choose places with the kernels of exact top-k, and torch adds up what is there.
    3. A kernel writes the mean into the bucket.
    """

    backend = "CUDA kernels, then torch"

    def __init__(self, task: SparseTask) -> None:
        super().__init__(task.group, task.slot_bytes, task.entries)
        self.task = task
        self.gathered_bytes, self.gathered_after = task.gathered()
        self.delivery = BucketDelivery(self.group, task.terms)

    @cached_property
    def kernel(self) -> MemoryKernel:
        return MemoryKernel(self.group, self.task.terms.gradient_dtype)

    def open(self, step: GroupStep) -> Opened:
        task = self.task
        binding = task.memory.stores["residual"].bind(self.group)
        before, c, ratio = binding.begin(step.scale)
        flags = self.kernel.open(step.bucket_flat, before, c, ratio)
        account = Account(c) if c is binding.flat else PackedAccount(c, binding)
        offer = Offer(
            account,
            task.selection,
            task.codec,
            flags,
            task.terms.place,
            phase="sparse",
            counts=step.counts,
            deliver=self.delivery.into(step.bucket_flat),
        )
        return Opened(self._run(offer), account)

    def _run(self, offer: Offer) -> Program[Outcome]:
        outcome: Outcome = yield from self.task.exchange.run(offer)
        offer.account.rest()
        return outcome


AGREEING_KERNELS = replace(
    TOP_K_KERNELS,
    name="kernels for agreed places",
    memories={RESIDUAL},
    exchanges={AGREED_PLACES},
    route=AgreedRoute,
)
register_backend(AGREEING_KERNELS)
