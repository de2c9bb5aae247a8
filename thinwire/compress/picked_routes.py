"""Picked routes: memory and selection by kernels, in one pass over the gradient, for exchanges that add on the way.

The exchange itself is the same torch code as without kernels, and sees the same numbers. It works on entries, of which there
are a hundredth of the elements. A kernel writes the mean of what it found into the bucket.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from thinwire.compress.backends import SparseTask, register_backend
from thinwire.compress.base import GroupStep, Opened, Route
from thinwire.compress.delivery import BucketDelivery
from thinwire.compress.kernel_routes import TOP_K_KERNELS
from thinwire.exchange.base import PICKED_ENTRIES, Offer, Outcome
from thinwire.exchange.requests import Program
from thinwire.kernels.cuda.fused_topk import FusedTopK
from thinwire.memory.account import Account
from thinwire.memory.base import RESIDUAL
from thinwire.memory.storage import PackedAccount
from thinwire.select.base import Picks
from thinwire.wire.codec import Codec
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES


class PickedRoute(Route):
    """1. Kernels add gradient and memory, and take the largest entries out of it.
    2. These return to memory: what of them is sent, the exchange decides.
    3. The exchange runs with them as this rank's picks.
    """

    backend = "CUDA kernels, then torch"

    def __init__(self, task: SparseTask, objection: str | None = None) -> None:
        """With the reason why kernels do not do the exchange too, if there are some."""
        super().__init__(task.group, task.slot_bytes, task.entries)
        self.task, self.objection = task, objection
        self.gathered_bytes, self.gathered_after = task.gathered()
        # Exact values: the exchange rounds what it sends.
        self.codec = Codec(task.codec.table, VALUE_CODES["fp32"], INDEX_CODES["int32"])

    @cached_property
    def kernels(self) -> FusedTopK:
        terms = self.task.terms
        return FusedTopK(self.group, self.codec, terms.gradient_dtype, terms.place.world)

    @cached_property
    def delivery(self) -> BucketDelivery:
        return BucketDelivery(self.group, self.task.terms)

    def open(self, step: GroupStep) -> Opened:
        task, codec = self.task, self.codec
        binding = task.memory.stores["residual"].bind(self.group)
        held, c, ratio = binding.begin(step.scale)
        payload = self.kernels.encode(step.bucket_flat, held, c, ratio)
        raw_values, raw_indices = codec.sections(payload)
        values, indices = raw_values.view(torch.float32), raw_indices.view(torch.int32)
        c.index_add_(0, codec.table.positions(indices), values)
        account = Account(c) if c is binding.flat else PackedAccount(c, binding)
        offer = Offer(
            account,
            task.selection,
            task.codec,
            codec.flags_of(payload),
            task.terms.place,
            phase="sparse",
            counts=step.counts,
            picks=Picks(values, indices),
            deliver=self.delivery.into(step.bucket_flat),
        )
        return Opened(self._run(offer), account)

    def _run(self, offer: Offer) -> Program[Outcome]:
        outcome: Outcome = yield from self.task.exchange.run(offer)
        offer.account.rest()
        return outcome


PICKING_KERNELS = replace(
    TOP_K_KERNELS,
    name="kernels for picked entries",
    memories={RESIDUAL},
    exchanges={PICKED_ENTRIES},
    route=PickedRoute,
)
register_backend(PICKING_KERNELS)
