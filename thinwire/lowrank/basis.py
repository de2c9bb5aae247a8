"""Basis: orthonormal columns that every rank computes alike."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# What a column adds to the ones before it counts from the square root of this share on, about what float32 resolves.
RIDGE = 1e-12


@functools.lru_cache(maxsize=1 << 16)
def name_hash(text: str) -> int:
    """The same number on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def draw(key: str, shape: tuple[int, ...]) -> Tensor:
    """Normal numbers that depend on `key` alone: on the CPU, in float32, from a generator of their own."""
    generator = torch.Generator().manual_seed(name_hash(key))
    return torch.randn(shape, generator=generator)


def orthogonalise(factor: Tensor, spare: Tensor) -> Tensor:
    """[B, n, r] -> orthonormal columns with the same span, matrix by matrix.

    1. Scale every column by its largest magnitude, so that no norm under- or overflows.
    2. Replace columns that are zero or not finite by those of `spare`: a direction that once died would stay dead.
    3. Householder QR; a single column is divided by its norm.
    """
    scaled = _scale_columns(factor, spare)
    if factor.shape[2] == 1:
        return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return torch.linalg.qr(scaled).Q


def cholesky_orthogonalise(factor: Tensor, spare: Tensor) -> Tensor:
    """The same for accelerators, where QR goes matrix by matrix and this takes all at once.

    1. and 2. as above.
    3. The Cholesky factor of X^T X shows what each column adds to those before it; one that adds nothing is replaced
       by the spare one.
    4. X = Q R with R from the Cholesky factor of X^T X, twice: the second time removes what rounding left over.
    """
    wide = _scale_columns(factor, spare).double()
    added = _cholesky(wide).diagonal(dim1=1, dim2=2).square()[:, None]
    wide = torch.where(added > 4 * RIDGE * added.amax(2, keepdim=True), wide, spare)
    for _ in range(2):
        wide = torch.linalg.solve_triangular(_cholesky(wide), wide.mT, upper=False).mT
    return wide.to(factor.dtype)


def _cholesky(wide: Tensor) -> Tensor:
    gram = wide.mT @ wide
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.amax(1, keepdim=True)
    return torch.linalg.cholesky_ex(gram).L


def _scale_columns(factor: Tensor, spare: Tensor) -> Tensor:
    largest = factor.abs().amax(1, keepdim=True)
    alive = (largest > 0) & (largest < torch.inf)
    return torch.where(alive, factor / largest, spare)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Matrix products in the full precision of their operands, whatever the training loop has chosen.

    TF32 or bfloat16 products would round a rank's contribution and the mean of all of them differently, and what
    falls between them would be lost. The choice is one for the whole process; products of other threads that run
    meanwhile are exact too.
    """
    precision = _PRECISIONS["cuda" if device.type == "cuda" else "cpu"]
    precision.raise_it()
    try:
        # A run on shapes alone (the meta device) has no autocast to ask.
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        precision.restore_it()


class _Precision:
    """The process-wide precision of products on one kind of device, raised while anybody needs it."""

    def __init__(self, matmul: Any) -> None:
        self.matmul = matmul
        self._lock = threading.Lock()
        self._users = 0
        self._chosen = "none"

    def raise_it(self) -> None:
        with self._lock:
            if not self._users:
                self._chosen = self.matmul.fp32_precision
                if self._chosen not in ("ieee", "none"):
                    self.matmul.fp32_precision = "ieee"
            self._users += 1

    def restore_it(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._chosen not in ("ieee", "none"):
                self.matmul.fp32_precision = self._chosen


_PRECISIONS = {
    "cuda": _Precision(torch.backends.cuda.matmul),
    "cpu": _Precision(torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
}
