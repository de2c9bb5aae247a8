"""Wire: the choice of value code and index code."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.described import Described
from thinwire.layout import SlotRows
from thinwire.validate import check_choice
from thinwire.wire.indices import INDEX_CODES, IndexCode
from thinwire.wire.values import VALUE_CODES, ValueCode


@dataclass(frozen=True, kw_only=True)
class Wire(Described):
    """How entries are written down; every rounding error of `values` stays in the sender's memory."""

    values: str = "bf16"
    """"fp32", "bf16", "fp16", "int8", "fp8", "int4" and "int2" (one bf16 scale per 64 entries), "sign" (one per 256)."""
    indices: str = "auto"
    """"int32", "auto" (16 bits inside short rows), "packed" (ceil(log2 L) bits), "rice" (close to the entropy)."""

    def __post_init__(self) -> None:
        check_choice("values", self.values, VALUE_CODES)
        check_choice("indices", self.indices, INDEX_CODES)

    @property
    def value_code(self) -> ValueCode:
        return VALUE_CODES[self.values]

    @property
    def index_code(self) -> IndexCode:
        return INDEX_CODES[self.indices]

    def bits_per_entry(self, rows: SlotRows) -> float:
        return self.value_code.bits + self.index_code.bits(rows)
