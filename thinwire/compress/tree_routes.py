"""Tree routes: merges of lists by kernels from the gradient to the update, with the bits of the torch code."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.compress.backends import SparseTask, register_backend
from thinwire.compress.base import GroupStep, Opened, Route
from thinwire.compress.kernel_accounts import TakeBackAccount
from thinwire.compress.picked_routes import PICKING_KERNELS, PickedRoute
from thinwire.compress.split_routes import rises
from thinwire.exchange.base import Outcome
from thinwire.exchange.common import sum_of_flags
from thinwire.exchange.places import split
from thinwire.exchange.requests import Program
from thinwire.exchange.tree import (
    MERGED_ENTRIES,
    Meeting,
    TreeMerge,
    meetings,
    merge_lists,
)
from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.messages import MessagesSent
from thinwire.kernels.cuda.tree import MOST_ELEMENTS, Left, TreeKernels
from thinwire.memory.store import Binding


def tree_route(task: SparseTask) -> Route:
    """All by kernels where they know how, else memory and selection."""
    reason = reason_against_kernels(task)
    return TreeRoute(task) if reason is None else PickedRoute(task, reason)


def reason_against_kernels(task: SparseTask) -> str | None:
    """Why the kernels cannot do the exchange too, as a sentence; None if they can."""
    if task.terms.place.world == 1:
        return "there is nobody to exchange with"
    if task.group.numel >= MOST_ELEMENTS:
        return "the kernels count the elements of a bucket with 30 bits"
    if not all(map(rises, task.codec.table.rows)):
        return "the kernels want entries in the order in which they lie in memory"
    return None


class TreeRoute(PickedRoute):
    """1. Kernels add gradient and memory, and take the largest entries out of it.
    2. They write the first list, merge lists, and write the last one into the bucket.
    """

    backend = "CUDA kernels"

    @cached_property
    def tree(self) -> TreeKernels:
        exchange, terms = self.task.exchange, self.task.terms
        assert isinstance(exchange, TreeMerge), "the form says so"
        return TreeKernels(
            self.group,
            self.codec,
            self.wire,
            terms.place.world,
            len(list(meetings(terms.place))),
            conserve=exchange.conserve,
            into_bucket=terms.gradient_dtype == torch.float32,
        )

    @property
    def wire(self) -> torch.dtype:
        wire = self.task.codec.values.dtype
        assert wire is not None, "the form says that values are floats"
        return wire

    def open(self, step: GroupStep) -> Opened:
        binding = self.task.memory.stores["residual"].bind(self.group)
        before, c, ratio = binding.begin(step.scale)
        payload = self.kernels.encode(step.bucket_flat, before, c, ratio)
        sent = self.tree.send(payload, c)
        account = TreeAccount(c, binding, self, sent)
        return Opened(self._exchange(account, step.bucket_flat), account)

    def _exchange(self, account: TreeAccount, bucket_flat: Tensor) -> Program[Outcome]:
        kernels, sent = self.tree, account.sent
        slots = len(self.group.slots)
        # What was not finite comes first there, and last in the sum.
        words = sent.offer[0, : slots + 1].roll(-1).float()
        own = KernelList(self, sent)
        flags = sum_of_flags(words, "sparse")
        yield from merge_lists(own, flags, self.task.terms.place, "sparse")
        out = bucket_flat
        if not kernels.into_bucket:
            out = torch.zeros(self.group.numel, device=bucket_flat.device)
        kernels.finish(own.message[None], sent, account.c, out)
        for left in own.left:
            kernels.bank(left, account.c)
        account.left = own.left
        account.arrive()
        counts = sent.stats[-slots:]
        return Outcome(out, kernels.wrong, sent=counts, delivered=kernels.into_bucket)


class KernelList:
    """This rank's list, merged by kernels."""

    def __init__(self, route: TreeRoute, sent: MessagesSent) -> None:
        self._route = route
        self.message, self.padding = sent.offer[0, route.tree.head :], sent.padding(0)
        self.left: list[Left] = []
        self._merges = 0

    def learn(self, flags: Tensor) -> None:
        self._route.tree.learn(flags)

    def merge(self, theirs: Tensor, meeting: Meeting) -> None:
        self.message, self.padding, left = self._route.tree.merge(
            self.message, theirs, self._merges, meeting.keeps
        )
        self._merges += 1
        self.left += [] if left is None else [left]


class TreeAccount(TakeBackAccount):
    """What was sent is known by the first list, and marks in it tell what has returned."""

    def __init__(self, c: Tensor, binding: Binding, route: TreeRoute, sent: MessagesSent) -> None:
        super().__init__(c, [binding], route.tree)
        self.sent = sent
        self.left: list[Left] = []
        """What is in memory of that which merges left over."""
        self._route = route

    def settle_jointly(self, bad: Tensor) -> Joint | None:
        # What is left over goes first.
        return None if self.left else super().settle_jointly(bad)

    def _joint_entry(self, used: Tensor) -> Joint | None:
        return self._route.tree.joint_entry(self.c, self.sent)

    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        for left in reversed(self.left):
            self._route.tree.unbank(left, self.c, bad)
        self._route.tree.give_back(self.c, self.sent, bad)

    def accepted(self) -> Tensor:
        route = self._route
        total = torch.zeros(route.group.numel, device=self.c.device)
        indices, values = split(self.sent.offer[0, route.tree.head :], route.wire)
        taken = indices >= 0
        total.index_add_(0, indices.clamp(min=0).long(), torch.where(taken, values.float(), 0.0))
        for left in self.left:
            positions = torch.where(left.amounts != 0, left.indices, 0)
            total.index_add_(0, positions, left.amounts, alpha=-1)
        return total


TREE_KERNELS = replace(
    PICKING_KERNELS,
    name="kernels for merges",
    exchanges={MERGED_ENTRIES},
    route=tree_route,
)
register_backend(TREE_KERNELS)
