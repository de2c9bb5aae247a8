"""Quantised sums by kernels: whether they can do one, how they are made for it, and what they do between launches."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.exchange.quantized import QuantizedSum
from thinwire.exchange.requests import Program
from thinwire.kernels.cuda.quantize import BLOCKS, QuantizedKernels, Scaling, SentCodes
from thinwire.kernels.cuda.toolchain import has_kernels
from thinwire.layout import Group


def reason_against_kernels(sum_: QuantizedSum) -> str | None:
    """Why the kernels cannot do it, as a sentence; None if they can."""
    if not has_kernels(sum_.group.device):
        return f"there are no kernels for {sum_.group.device}"
    messages = sum_.offer.nbytes, sum_.sums.nbytes
    if max(*messages, *(slot.numel for slot in sum_.group.slots)) >= 1 << 31:
        return (
            "the kernels count the bytes of a message and the elements of a parameter with 32 bits"
        )
    if sum_.per_host > 1:
        return "the kernels do not know hosts of several ranks"
    if not (sum_.quantizer.has_kernels and sum_.sum_quantizer.has_kernels):
        return "the kernels do not know these codes"
    if sum_.owned.size not in BLOCKS:
        return f"the kernels know blocks of {', '.join(map(str, BLOCKS))} elements"
    return None


def make_kernels(
    sum_: QuantizedSum,
    group: Group,
    gradient_dtype: torch.dtype,
    *,
    keeps: bool,
    scaling: Scaling | None = None,
) -> QuantizedKernels:
    """The kernels of a sum. `group` says where its slots lie in what they read and write."""
    return QuantizedKernels(
        group,
        sum_.owned,
        (sum_.quantizer, sum_.sum_quantizer),
        (sum_.offer, sum_.sums),
        sum_.place.rank,
        gradient_dtype,
        stochastic=sum_.stochastic,
        keeps=keeps,
        scaling=scaling,
    )


def add_up(
    sum_: QuantizedSum, kernels: QuantizedKernels, sent: SentCodes, memory: Tensor
) -> Program[Tensor]:
    """uint8 [world, bytes]: all owners' sums of what the ranks have sent, to be delivered. What is left of them goes to memory."""
    arrived = yield from sum_.deal_out(sent.offer)
    kernels.add_up(arrived, sent, memory)
    gathered = yield from sum_.gather(sent.sums)
    return gathered
