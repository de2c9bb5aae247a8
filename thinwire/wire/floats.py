"""The contract of a value code, and the plain floating-point codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.forms import Formed
from thinwire.layout import RowTable

FLOATS = "floating-point numbers"
"""The form of codes that write values of one dtype one behind the other."""


class ValueCode(Formed, ABC):
    """values -> bytes -> values; what decoding loses stays in the sender's memory.

    Every code saturates and none turns a finite value into an infinity.
    """

    computed_by = ("nbytes", "encode", "decode")

    name: str
    bits: float
    """Bits per entry, block scales included."""
    dtype: torch.dtype | None = None
    """Of codes that are plain numbers, which can be added on the way."""
    has_zero: bool = True
    """Whether a place left over decodes to a value that adds nothing; otherwise the codec clears it by the count."""
    writes_nan: bool = True
    """Whether a NaN can be decoded from an honest payload."""

    @abstractmethod
    def nbytes(self, table: RowTable) -> int: ...

    @abstractmethod
    def encode(self, values: Tensor, table: RowTable) -> Tensor:
        """uint8 [nbytes]."""

    @abstractmethod
    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        """float32 [entries]; NaN where the bytes are none that `encode` writes."""


@dataclass(frozen=True)
class FloatCode(ValueCode):
    """A plain floating-point format; values beyond its range become its largest finite number."""

    name: str
    dtype: torch.dtype

    form = FLOATS

    @property
    def bits(self) -> float:  # type: ignore[override]
        return 8.0 * self.dtype.itemsize

    def nbytes(self, table: RowTable) -> int:
        return table.entries * self.dtype.itemsize

    def encode(self, values: Tensor, table: RowTable) -> Tensor:
        limit = torch.finfo(self.dtype).max
        # Clamping first matters: a cast alone would turn a large finite value into an infinity.
        return values.clamp(-limit, limit).to(self.dtype).view(torch.uint8)

    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        return raw.view(self.dtype).float()
