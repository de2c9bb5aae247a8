"""Split routes: split-and-reduce by kernels from the gradient to the update, with the bits of the torch code."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.compress.backends import SparseTask, register_backend
from thinwire.compress.base import GroupStep, Opened, Route
from thinwire.compress.kernel_accounts import TakeBackAccount
from thinwire.compress.picked_routes import PICKING_KERNELS, PickedRoute
from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import Program
from thinwire.exchange.split import SPLIT_ENTRIES, OwnedSums, SplitLayout
from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.messages import MessagesSent
from thinwire.kernels.cuda.split import SplitKernels
from thinwire.kernels.cuda.split_tables import MOST_OWNERS, SplitTables
from thinwire.layout import SlotRows
from thinwire.memory.store import Binding


def split_route(task: SparseTask) -> Route:
    """All by kernels where they know how, else memory and selection."""
    reason = reason_against_kernels(task)
    return SplitRoute(task) if reason is None else PickedRoute(task, reason)


def reason_against_kernels(task: SparseTask) -> str | None:
    """Why the kernels cannot do the exchange too, as a sentence; None if they can."""
    exchange, world = task.exchange, task.terms.place.world
    assert isinstance(exchange, OwnedSums), "the form says so"
    if world == 1:
        return "there is nobody to exchange with"
    beside = exchange.objection_to_kernels(task.codec.table, world)
    if beside is not None:
        return f"the kernels do not know {beside}"
    if world > MOST_OWNERS:
        return f"the kernels know up to {MOST_OWNERS} ranks"
    if task.group.numel >= 1 << 31:
        return "the kernels count the elements of a bucket with 32 bits"
    if not all(map(rises, task.codec.table.rows)):
        return "the kernels want entries in the order in which they lie in memory"
    return None


def rises(rows: SlotRows) -> bool:
    """Whether entries, row after row, lie at rising places."""
    offsets = rows.row_offsets()
    ends = offsets + (rows.length - 1) * rows.stride
    return bool((ends[:-1] < offsets[1:]).all())


def tables_of(layout: SplitLayout) -> SplitTables:
    """What the kernels are told of owners and places."""
    regions, back = layout.regions, layout.back.sizes
    _, blocks, firsts, _, shifts, _ = regions.by_slot.tolist()
    return SplitTables(
        regions.edges.tolist(),
        blocks,
        firsts,
        shifts,
        rooms=layout.places.sizes,
        back=back,
        winners=layout.winners or [layout.world * room for room in back],
        owners=regions.boxes // len(back),
        begins=regions.firsts,
        starts=regions.starts,
        region_blocks=regions.blocks,
    )


class SplitRoute(PickedRoute):
    """1. Kernels add gradient and memory, and take the largest entries out of it.
    2. They write messages to owners, sum what arrives, and write the winners into the bucket.
    """

    backend = "CUDA kernels"

    @cached_property
    def layout(self) -> SplitLayout:
        """On the CPU: the device has the tables of the kernels."""
        task = self.task
        assert isinstance(task.exchange, OwnedSums), "the form says so"
        wire = task.codec.values.dtype
        assert wire is not None, "the form says that values are floats"
        return SplitLayout(
            task.exchange, task.codec.table, wire, task.terms.place, torch.device("cpu")
        )

    @cached_property
    def split(self) -> SplitKernels:
        layout, terms = self.layout, self.task.terms
        return SplitKernels(
            self.group,
            self.codec,
            tables_of(layout),
            layout.wire,
            terms.place.rank,
            terms.place.world,
            into_bucket=terms.gradient_dtype == torch.float32,
        )

    def open(self, step: GroupStep) -> Opened:
        binding = self.task.memory.stores["residual"].bind(self.group)
        before, c, ratio = binding.begin(step.scale)
        payload = self.kernels.encode(step.bucket_flat, before, c, ratio)
        sent = self.split.send(payload, c)
        account = SplitAccount(c, binding, self, sent)
        return Opened(self._exchange(account, step.bucket_flat), account)

    def _exchange(self, account: SplitAccount, bucket_flat: Tensor) -> Program[Outcome]:
        kernels, layout, sent = self.split, self.layout, account.sent
        arrived = yield from layout.deal_out(sent.offer, kernels.head, sent.padding(0))
        kernels.add_up(arrived, sent)
        gathered = yield from layout.gather(sent.sums, sent.padding(1))
        out = bucket_flat
        if not kernels.into_bucket:
            out = torch.zeros(self.group.numel, device=bucket_flat.device)
        kernels.finish(gathered, sent, account.c, out)
        account.arrive()
        counts = sent.stats[-len(self.group.slots) :]
        return Outcome(out, kernels.wrong, sent=counts, delivered=kernels.into_bucket)


class SplitAccount(TakeBackAccount):
    """What was sent is known by its messages, and marks in them tell what has returned."""

    def __init__(self, c: Tensor, binding: Binding, route: SplitRoute, sent: MessagesSent) -> None:
        super().__init__(c, [binding], route.split)
        self.sent = sent
        self._route = route

    def _joint_entry(self, used: Tensor) -> Joint | None:
        return self._route.split.joint_entry(self.c, self.sent)

    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        self._route.split.give_back(self.c, self.sent, bad)

    def accepted(self) -> Tensor:
        kernels, layout, sent = self._route.split, self._route.layout, self.sent
        total = torch.zeros(self._route.group.numel)
        positions, values = layout.read(sent.offer[:, kernels.head :].cpu(), layout.places)
        total.index_add_(0, positions, values)
        if sent.finished and sent.lost.numel():
            rank = self._route.task.terms.place.rank
            positions, _ = layout.read(sent.sums[None].cpu(), layout.back, rank)
            total.index_add_(0, positions, sent.lost.cpu(), alpha=-1)
        return total.to(sent.offer.device)


SPLIT_KERNELS = replace(
    PICKING_KERNELS,
    name="kernels for split-and-reduce",
    exchanges={SPLIT_ENTRIES},
    route=split_route,
)
register_backend(SPLIT_KERNELS)
