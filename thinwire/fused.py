"""FusedSparse: memory -> select -> wire -> exchange of exact top-k as a few CUDA kernels.

The same method as `SparseCompressor` chains from its parts, with the same bits; used where every part of it is one that the
kernels know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.exchange import requests
from thinwire.exchange.base import Exchange, Outcome
from thinwire.exchange.gather import AllGatherFast
from thinwire.exchange.requests import Place, Program
from thinwire.kernels.cuda.fused import FLOAT_CODES, FusedTopK
from thinwire.kernels.cuda.launch import has_kernels
from thinwire.memory.account import Account
from thinwire.memory.base import MemoryState
from thinwire.memory.residual import ResidualState
from thinwire.memory.store import Binding
from thinwire.select.base import Session
from thinwire.select.topk import ExactTopK
from thinwire.wire.codec import Codec
from thinwire.wire.fixed import FixedWidthCode
from thinwire.wire.floats import FloatCode

ALIGNMENT = 16


def can_fuse(
    session: Session, memory: MemoryState, exchange: Exchange, codec: Codec, bucket_flat: Tensor
) -> bool:
    """Whether the kernels do what these parts do, on this device and in this layout."""
    return (
        isinstance(session.selector, ExactTopK)
        and type(session) is Session
        and isinstance(memory, ResidualState)
        and (memory.setting.beta, memory.setting.gamma, memory.setting.storage)
        == (1.0, 1.0, "fp32")
        and type(exchange) is AllGatherFast
        and isinstance(codec.values, FloatCode)
        and isinstance(codec.indices, FixedWidthCode)
        and bucket_flat.dtype in FLOAT_CODES
        and bucket_flat.data_ptr() % ALIGNMENT == 0
        and has_kernels(bucket_flat.device)
    )


class FusedAccount(Account):
    """What was sent is known by its payload alone; taking it back costs one look at a flag unless it has to be done."""

    def __init__(self, c: Tensor, kernels: FusedTopK, payload: Tensor) -> None:
        super().__init__(c)
        self.kernels = kernels
        self.payload = payload
        self.used: Tensor | None = None
        """uint8 [slots], once the headers of all ranks are there."""

    def settle(self, bad: Tensor) -> None:
        turned = bad if self._verdict is None else bad & ~self._verdict
        # If the exchange broke off, nothing was given back yet.
        used = self.kernels.every_slot if self.used is None else self.used
        self.kernels.give_back(self.c, self.payload, used, turned, of_used=True)
        if self._rounding is None:
            self._verdict = bad
        else:
            super().settle(bad)

    def accepted(self) -> Tensor:
        codec = self.kernels.codec
        positions, values = codec.decode(self.payload)
        if self.used is not None:
            taken = self.used[codec.table.entry_slots(values.device).long()].bool()
            values = torch.where(taken, values, 0.0)
        return torch.zeros_like(self.c).index_add_(0, positions, values.to(self.c.dtype))


def open_fused(
    kernels: FusedTopK, binding: Binding, bucket_flat: Tensor, scale: Tensor | None, place: Place
) -> tuple[FusedAccount, Program[Outcome]]:
    """Select and encode now; the program gathers, decodes and delivers."""
    ratio = binding.retarget(scale)
    payload = kernels.encode(bucket_flat, binding.flat, ratio)
    account = FusedAccount(binding.flat, kernels, payload)
    return account, _exchange(kernels, account, bucket_flat, place)


def _exchange(
    kernels: FusedTopK, account: FusedAccount, bucket_flat: Tensor, place: Place
) -> Program[Outcome]:
    """AllGatherFast's steps 2 to 4; slots no rank had a gradient for get no update and their entries return to memory."""
    gathered = account.payload[None]
    if place.world > 1:
        request = requests.AllGather(
            account.payload, "sparse", kernels.codec.control_bytes, apart=True
        )
        (gathered,) = yield (request,)
    used, status = kernels.read_headers(gathered)
    account.used = used
    kernels.give_back(account.c, account.payload, used, status[1], of_used=False)
    out = bucket_flat
    if not kernels.into_bucket:
        out = torch.zeros(kernels.group.numel, dtype=torch.float32, device=bucket_flat.device)
    kernels.decode(gathered, out, used, status)
    return Outcome(out, status[0], delivered=kernels.into_bucket)
