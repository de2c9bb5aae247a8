"""Value codes: how the chosen values are written down. All saturate, none creates an infinity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.select.rows import RowTable


class ValueCode(ABC):
    """values -> bytes -> values; what decoding loses stays in the sender's memory."""

    name: str
    bits: float

    @abstractmethod
    def nbytes(self, table: RowTable) -> int: ...

    @abstractmethod
    def encode(self, values: Tensor, table: RowTable) -> Tensor:
        """uint8 [nbytes]."""

    @abstractmethod
    def decode(self, raw: Tensor, table: RowTable) -> Tensor:
        """float32 [entries]."""


@dataclass(frozen=True)
class FloatCode(ValueCode):
    """A plain floating-point format; values beyond its range become its largest finite number."""

    name: str
    dtype: torch.dtype

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


VALUE_CODES: dict[str, ValueCode] = {
    "fp32": FloatCode("fp32", torch.float32),
    "bf16": FloatCode("bf16", torch.bfloat16),
    "fp16": FloatCode("fp16", torch.float16),
}
