"""DenseCompressor: tensors that travel whole, by a sum of their own or beside what is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.compressor import BucketStep, Compressor, GroupStep, Opened, is_small_beside
from thinwire.exchange.base import Outcome
from thinwire.exchange.dense import dense_mean
from thinwire.exchange.requests import AllGather, AllReduce, Place, Program, Request
from thinwire.kernels.cuda.dense import FusedDense
from thinwire.kernels.cuda.launch import has_kernels
from thinwire.plan.groups import Group


class DenseCompressor(Compressor):
    """The plain mean, optionally in a narrower dtype on the wire."""

    travels_whole = True

    def __init__(self, wire_dtype: torch.dtype | None) -> None:
        self.wire_dtype = wire_dtype
        self._never: dict[torch.device, Tensor] = {}
        self._kernels: WeakKeyDictionary[Group, FusedDense] = WeakKeyDictionary()
        self._shares: WeakKeyDictionary[Group, tuple[float, list[float], list[int]]] = (
            WeakKeyDictionary()
        )

    def can_be_carried(self, group: Group, dtype: torch.dtype) -> bool:
        return self._is_plain(dtype) and has_kernels(group.device)

    def _is_plain(self, dtype: torch.dtype) -> bool:
        float32 = self.wire_dtype in (None, torch.float32) and dtype == torch.float32
        return float32 and type(self) is DenseCompressor

    def open_fused(self, step: BucketStep) -> Opened | None:
        """Nobody has to look first: what is not finite travels by the sum, and every rank sees it there."""
        if type(self) is not DenseCompressor:
            return None
        plain = self._is_plain(step.bucket_flat.dtype)
        if plain and is_small_beside(step.group, step.company):
            return self._open_beside(step)
        sums = step.place.world > 1 and not step.deterministic
        if plain and sums and has_kernels(step.group.device):
            if step.carrier is not None:
                program = self._be_carried(step.bucket_flat, step.carrier)
            else:
                kernels = self._find_kernels(step)
                request = AllReduce(kernels.send(step.bucket_flat).view(torch.float32), "dense")
                program = self._run_kernels(kernels, request, step.bucket_flat)
            return self._described(program, step.group, step.place, torch.float32)
        gradients = step.group.pieces(step.bucket_flat)
        return self._opened(step.group, gradients, None, step.place, step.deterministic)

    def _find_kernels(self, step: BucketStep) -> FusedDense:
        if step.group not in self._kernels:
            self._kernels[step.group] = FusedDense(step.group, step.place.world)
        return self._kernels[step.group]

    def _open_beside(self, step: BucketStep) -> Opened:
        group, place = step.group, step.place
        if step.carrier is not None:
            program = self._be_carried(step.bucket_flat, step.carrier)
        elif has_kernels(group.device):
            kernels = self._find_kernels(step)
            request = AllGather(kernels.send(step.bucket_flat), "dense", apart=True)
            program = self._run_kernels(kernels, request, step.bucket_flat)
        else:
            program = self._gather(group, group.pieces(step.bucket_flat), place)
        shares = self._share(group, 4.0 * (place.world - 1))
        return Opened(program, None, *shares, compressed=False, gathered=True)

    def _share(self, group: Group, per_element: float) -> tuple[list[float], list[int]]:
        """(bytes, entries) of every slot; the same in every step."""
        known = self._shares.get(group)
        if known is None or known[0] != per_element:
            entries = [slot.numel for slot in group.slots]
            known = self._shares[group] = (per_element, [per_element * n for n in entries], entries)
        return known[1:]

    def _be_carried(self, bucket_flat: Tensor, carrier: Opened) -> Program[Outcome]:
        """What the carrier's program does in its first round is all there is to do."""
        yield from ()
        assert carrier.carries is not None
        return Outcome(bucket_flat, carrier.carries, delivered=True)

    def _run_kernels(
        self, kernels: FusedDense, request: Request, bucket_flat: Tensor
    ) -> Program[Outcome]:
        """The reply is what every rank sent, or the one row of their sum."""
        (reply,) = yield (request,)
        kernels.mean(torch.atleast_2d(reply), bucket_flat)
        return Outcome(bucket_flat, kernels.wrong, delivered=True)

    def _gather(self, group: Group, gradients: Sequence[Tensor], place: Place) -> Program[Outcome]:
        """The same in torch: a sum in rank order, each part divided before as in `dense_mean`."""
        # Whole words of 16 bytes, behind which a payload stays aligned.
        buffer = torch.zeros(-(-group.numel // 4) * 4, device=group.device)
        torch._foreach_copy_(group.spans(buffer), list(gradients))
        buffer.div_(place.world)
        (gathered,) = yield (AllGather(buffer.view(torch.uint8), "dense", apart=True),)
        first, *others = gathered.view(torch.float32)
        total = first.clone()
        for other in others:
            total += other
        return Outcome(total[: group.numel], self._no(group.device))

    def open(self, step: GroupStep) -> Opened:
        return self._opened(
            step.group, step.gradients, step.flags.non_finite, step.place, step.deterministic
        )

    def _opened(
        self,
        group: Group,
        gradients: Sequence[Tensor],
        non_finite: Tensor | None,
        place: Place,
        deterministic: bool,
    ) -> Opened:
        dtype = self.wire_dtype or gradients[0].dtype

        def run() -> Program[Outcome]:
            buffer = torch.zeros(group.numel, dtype=dtype, device=group.device)
            torch._foreach_copy_(group.spans(buffer), list(gradients))
            if non_finite is not None:
                # What was not finite has been set to zero; a NaN in its place travels by the sum.
                buffer[:1] += torch.where(non_finite, torch.nan, 0.0)
            mean = yield from dense_mean(buffer, place, deterministic=deterministic, phase="dense")
            return Outcome(mean, self._no(group.device))

        return self._described(run(), group, place, dtype)

    def _described(
        self, program: Program[Outcome], group: Group, place: Place, dtype: torch.dtype
    ) -> Opened:
        shares = self._share(group, 2 * (place.world - 1) / place.world * dtype.itemsize)
        return Opened(program, None, *shares, compressed=False)

    def _no(self, device: torch.device) -> Tensor:
        """The pipeline looks at the update itself."""
        if device not in self._never:
            self._never[device] = torch.zeros((), dtype=torch.bool, device=device)
        return self._never[device]
