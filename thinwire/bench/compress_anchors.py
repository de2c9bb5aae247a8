"""Anchors of the compression benchmark: what the published programs do, tensor by tensor in plain torch.

    torch-topk        the k largest magnitudes of every tensor
    torch-row-topk    of every fibre along axis 1, as ADTopk is published
    torch-sampled     above a threshold estimated from a sample, as DGC is published, without its momentum
    torch-gaussiank   above the threshold of a fitted normal law, as GaussianK is published
    torch-powersgd    the arithmetic of torch's PowerSGD hook, both factors and what is left, without the two sums

All keep a residual in the cheapest way: the gradient is added to it in place, and what is sent is zeroed in it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

import thinwire as tw
from thinwire.bench.compress_gradients import Gradients
from thinwire.bench.compress_timing import Stopwatch
from thinwire.errors import UsageError
from thinwire.layout import ParameterInfo

COMPRESS = "encode"
RANK = 4


class TensorAnchor(ABC):
    """One way to compress a list of tensors with a residual each."""

    def __init__(
        self, infos: Sequence[ParameterInfo], density: float, device: torch.device
    ) -> None:
        total = sum(info.numel for info in infos)
        self.density = density
        self._flat = torch.zeros(total, device=device)
        self._residual = torch.zeros(total, device=device)
        sizes = [info.numel for info in infos]
        self.gradients, self.residuals = (
            [piece.view(info.shape) for piece, info in zip(flat.split(sizes), infos, strict=True)]
            for flat in (self._flat, self._residual)
        )
        self._source = Gradients(device, total)
        self.payload_bytes = 0
        self._step = 0

    @torch.no_grad()
    def lap(self, watch: Stopwatch) -> None:
        """One step of one worker."""
        self._source.fill(self._flat, self._step)
        self._step += 1
        with watch.span(COMPRESS):
            payload = self.compress()
        self.payload_bytes = sum(tensor.nbytes for tensor in payload)

    @abstractmethod
    def compress(self) -> list[Tensor]:
        """Add the gradients to the residuals and take out of them what is returned."""


class PerTensor(TensorAnchor):
    """One tensor after the other, as a hook per parameter does it."""

    def compress(self) -> list[Tensor]:
        payload: list[Tensor] = []
        for gradient, residual in zip(self.gradients, self.residuals, strict=True):
            payload += self.select(residual.add_(gradient))
        return payload

    @abstractmethod
    def select(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """(values, indices) of what is sent of `c`, which is zeroed there."""


class GlobalTopK(PerTensor):
    def select(self, c: Tensor) -> tuple[Tensor, Tensor]:
        flat = c.view(-1)
        keep = max(1, int(flat.numel() * self.density))
        indices = flat.abs().topk(keep, sorted=False).indices
        values = flat.gather(0, indices)
        flat.index_fill_(0, indices, 0.0)
        return values, indices


class RowTopK(PerTensor):
    def select(self, c: Tensor) -> tuple[Tensor, Tensor]:
        keep = max(1, int(c.shape[1] * self.density))
        indices = c.abs().topk(keep, dim=1, sorted=False).indices
        values = c.gather(1, indices)
        c.scatter_(1, indices, 0.0)
        return values, indices


class SampledTopK(PerTensor):
    """DGC's search: the host looks at every count."""

    def select(self, c: Tensor) -> tuple[Tensor, Tensor]:
        flat, rule = c.view(-1), tw.select.SampledThreshold(self.density)
        magnitude = flat.abs()
        wanted = math.ceil(flat.numel() * self.density)
        stride = rule.stride(flat.numel(), self.density)
        sample = magnitude[self._step % stride :: stride]
        hits = max(1, math.ceil(sample.numel() * self.density))
        threshold = float(sample.topk(hits, sorted=False).values.min())
        indices = (magnitude >= threshold).nonzero().view(-1)
        for _ in range(rule.iterations if stride > 1 else 0):
            count = indices.numel()
            if count > rule.upper * wanted:
                indices = indices[magnitude[indices].topk(wanted, sorted=False).indices]
                break
            if count >= rule.lower * wanted:
                break
            threshold *= rule.lower
            indices = (magnitude >= threshold).nonzero().view(-1)
        indices = indices[:wanted]
        values = flat[indices]
        flat.index_fill_(0, indices, 0.0)
        return values, indices


class GaussianTopK(PerTensor):
    TURNS = 3

    def select(self, c: Tensor) -> tuple[Tensor, Tensor]:
        flat = c.view(-1)
        keep = max(1, int(flat.numel() * self.density))
        z = NormalDist().inv_cdf(self.density / 2)
        threshold = float(flat.mean() - z * flat.std())
        magnitude = flat.abs()
        for _ in range(self.TURNS):
            mask = magnitude > threshold
            count = int(mask.sum())
            if 3 * count < 2 * keep:
                threshold *= 0.5
            elif 3 * count > 4 * keep:
                threshold *= 1.5
            else:
                break
        indices = mask.nonzero().view(-1)
        values = flat[indices]
        flat.index_fill_(0, indices, 0.0)
        return values, indices


class TorchPowerSGD(TensorAnchor):
    """As torch's hook by default: matrices one by one, the last step's Q to start from, QR to orthogonalise."""

    def __init__(
        self, infos: Sequence[ParameterInfo], density: float, device: torch.device
    ) -> None:
        super().__init__(infos, density, device)
        self._orthogonalise = find_orthogonalise()
        self._kept = torch.empty_like(self._flat)
        self._matrices = [g.view(1, g.shape[0], -1) for g in self.gradients]
        self._p, self._q = [], []
        for matrix in self._matrices:
            _, rows, columns = matrix.shape
            rank = min(RANK, rows, columns)
            self._p.append(torch.empty(1, rows, rank, device=device))
            self._q.append(torch.randn(1, columns, rank, device=device))

    def compress(self) -> list[Tensor]:
        """The gradients become what all workers would decode, the residuals what is left."""
        self._flat.add_(self._residual)
        self._kept.copy_(self._flat)
        for q in self._q:
            self._orthogonalise(q)
        for matrix, p, q in zip(self._matrices, self._p, self._q, strict=True):
            torch.bmm(matrix, q, out=p)
        for p in self._p:
            self._orthogonalise(p)
        for matrix, p, q in zip(self._matrices, self._p, self._q, strict=True):
            torch.bmm(matrix.transpose(1, 2), p, out=q)
        for matrix, p, q in zip(self._matrices, self._p, self._q, strict=True):
            torch.bmm(p, q.transpose(1, 2), out=matrix)
        torch.sub(self._kept, self._flat, out=self._residual)
        return [*self._p, *self._q]


def find_orthogonalise() -> Callable[[Tensor], None]:
    """torch's own function, so that the anchor cannot drift from it."""
    try:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook
    except ModuleNotFoundError as error:
        raise UsageError(
            f"torch-powersgd needs the package {error.name!r}, which is not installed"
        ) from None
    return hook._orthogonalize


@dataclass(frozen=True)
class AnchorSpec:
    """An anchor by its name."""

    make: type[TensorAnchor]
    takes_density: bool = True
    work: str = COMPRESS


ANCHORS = {
    "torch-topk": AnchorSpec(GlobalTopK),
    "torch-row-topk": AnchorSpec(RowTopK),
    "torch-sampled": AnchorSpec(SampledTopK),
    "torch-gaussiank": AnchorSpec(GaussianTopK),
    "torch-powersgd": AnchorSpec(TorchPowerSGD, takes_density=False, work="encode and decode"),
}
