"""FusedSparse: memory -> select -> wire -> exchange of exact top-k as a few CUDA kernels.

The same method as `SparseCompressor` chains from its parts, with the same bits; used where every part of it is one that the
kernels know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.exchange import requests
from thinwire.exchange.base import Exchange, Outcome
from thinwire.exchange.gather import AllGatherFast
from thinwire.exchange.requests import Place, Program
from thinwire.kernels.cuda.fused import Correction, FusedTopK
from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.launch import has_kernels
from thinwire.kernels.cuda.prepared import FLOAT_CODES, PreparedKernels
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.memory.momentum import MomentumState
from thinwire.memory.residual import ResidualState
from thinwire.memory.store import Binding
from thinwire.plan.groups import Group
from thinwire.select.base import Session
from thinwire.select.topk import ExactTopK
from thinwire.wire.codec import Codec
from thinwire.wire.fixed import FixedWidthCode, PackedCode
from thinwire.wire.floats import FloatCode

ALIGNMENT = 16


def can_fuse(
    session: Session, memory: MemoryState, exchange: Exchange, codec: Codec, bucket_flat: Tensor
) -> bool:
    """Whether the kernels do what these parts do, on this device and in this layout."""
    return (
        isinstance(session.selector, ExactTopK)
        and type(session) is Session
        and knows_memory(memory)
        and type(exchange) is AllGatherFast
        and isinstance(codec.values, FloatCode)
        and isinstance(codec.indices, FixedWidthCode | PackedCode)
        and bucket_flat.dtype in FLOAT_CODES
        and bucket_flat.data_ptr() % ALIGNMENT == 0
        and has_kernels(bucket_flat.device)
    )


def knows_memory(memory: MemoryState) -> bool:
    match memory:
        case ResidualState(setting=residual):
            return (residual.beta, residual.gamma) == (1.0, 1.0)
        case MomentumState():
            return True
    return False


def make_kernels(
    memory: MemoryState,
    group: Group,
    codec: Codec,
    gradient_dtype: torch.dtype,
    world: int,
    beside: Group | None,
    summed: bool,
) -> FusedTopK:
    """The kernels for parts that `can_fuse`; `beside` is a dense group of the same bucket that they carry along."""
    correction = None
    if isinstance(memory, MomentumState):
        setting = memory.setting
        assert setting.momentum is not None
        correction = Correction(setting.momentum, bool(setting.nesterov), setting.masking)
    return FusedTopK(group, codec, gradient_dtype, world, correction, beside, summed)


class FusedAccount(Account):
    """What was sent is known by its payload alone; taking it back costs a look at two flags unless it has to be done.

    Entries of slots that no rank had a gradient for return at `settle` with the others that may have to. A narrow memory is
    packed as soon as the exchange has ended, so that they return before, and again after what was taken back.
    """

    def __init__(
        self,
        c: Tensor,
        bindings: Sequence[Binding],
        kernels: PreparedKernels,
        sent: Tensor,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(c)
        self.bindings = bindings
        """Of c and, if there is one, of the momentum."""
        self.kernels = kernels
        self.sent = sent
        """The buffer that the payload is in."""
        self.momentum = momentum
        """What the kernels were told of a momentum, if there is one."""
        self.used: Tensor | None = None
        """uint8 [slots], once the headers of all ranks are there."""
        self._unused: Tensor = kernels.never
        """bool []: entries of slots without a gradient have to return."""

    @property
    def payload(self) -> Tensor:
        return self.kernels.payload(self.sent)

    def arrive(self) -> None:
        """The headers of all ranks have been read, and the exchange has ended."""
        self.used, self._unused = self.kernels.used, self.kernels.unused
        if self.c is not self.bindings[0].flat:
            self._return_unused()
            self.rest()

    def settle_jointly(self, bad: Tensor) -> Joint | None:
        plain = self.c is self.bindings[0].flat and self.c.numel()
        if not plain or self._verdict is not None or self._rounding is not None:
            return None
        kernels = self.kernels
        if not isinstance(kernels, FusedTopK):
            return None
        used = kernels.every_slot if self.used is None else self.used
        book = kernels.book(self.c, self.sent, used, self._unused, self.momentum)
        self._verdict, self._unused = bad, kernels.never
        return kernels.joint, book

    def settle(self, bad: Tensor) -> None:
        turned = bad if self._verdict is None else bad & ~self._verdict
        # If the exchange broke off, nothing was given back yet.
        used = self.kernels.every_slot if self.used is None else self.used
        resting = self.c is self.bindings[0].flat
        flag = turned if resting and self._rounding is None else None
        if resting:
            self._take([binding.lift(flag) for binding in self.bindings])
        # First what came last, so that every sum on the way is one that c has held before.
        if self._rounding is None:
            self._verdict = bad
        else:
            super().settle(bad)
        self.kernels.give_back(self.c, self.sent, used, turned, self._unused, self.momentum)
        self._unused = self.kernels.never
        self.rest(flag)

    def rest(self, flag: Tensor | None = None) -> None:
        for binding, flat in zip(self.bindings, (self.c, *self.momentum[:1]), strict=True):
            binding.rest(flat, flag)
        self._take([binding.flat for binding in self.bindings])

    def _take(self, flats: Sequence[Tensor]) -> None:
        """Go on in these buffers."""
        self.c = flats[0]
        self.momentum = [*flats[1:], *self.momentum[1:]]

    def _return_unused(self) -> None:
        kernels, used = self.kernels, self.kernels.used
        kernels.give_back(self.c, self.sent, used, kernels.never, self._unused, self.momentum)
        self._unused = kernels.never

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


def open_fused(
    kernels: PreparedKernels,
    memory: MemoryState,
    bucket_flat: Tensor,
    scale: Tensor | None,
    place: Place,
) -> tuple[FusedAccount, Program[Outcome]]:
    """Select and encode now; the program gathers, decodes and delivers."""
    bindings = [memory.stores["residual"].bind(kernels.group)]
    momentum: Sequence[Tensor] = ()
    if isinstance(memory, MomentumState):
        assert isinstance(kernels, FusedTopK)
        u = memory.stores["momentum"].bind(kernels.group)
        bindings.append(u)
        momentum = kernels.open_momentum(u.lift(), u.retarget(scale))
    c = bindings[0].lift()
    sent = kernels.encode(bucket_flat, c, bindings[0].retarget(scale), momentum)
    account = FusedAccount(c, bindings, kernels, sent, momentum)
    return account, _exchange(kernels, account, bucket_flat, place)


def _exchange(
    kernels: PreparedKernels, account: FusedAccount, bucket_flat: Tensor, place: Place
) -> Program[Outcome]:
    """AllGatherFast's steps 2 to 4; slots no rank had a gradient for get no update and their entries return to memory."""
    out = bucket_flat
    if not kernels.into_bucket:
        out = torch.zeros(kernels.group.numel, dtype=torch.float32, device=bucket_flat.device)
    sent, control = account.sent, kernels.codec.control_bytes
    if place.world == 1:
        kernels.decode(sent[None], out)
    elif kernels.summed:
        dense = sent[: kernels.before].view(torch.float32)
        payload = kernels.payload(sent)
        sums, gathered = yield (
            requests.AllReduce(dense, "dense"),
            requests.AllGather(payload, "sparse", control, apart=True),
        )
        kernels.decode(gathered, out, sums)
    else:
        phase = "dense+sparse" if kernels.before else "sparse"
        (gathered,) = yield (requests.AllGather(sent, phase, control, apart=True),)
        kernels.decode(gathered, out)
    account.arrive()
    return Outcome(out, kernels.wrong, delivered=kernels.into_bucket)
