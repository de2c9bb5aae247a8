"""Index codes by name: how the places of the chosen entries are written down."""

from __future__ import annotations

from thinwire.wire.entropy import EntropyCode
from thinwire.wire.fixed import FixedWidthCode, IndexCode, PackedCode

__all__ = ["INDEX_CODES", "EntropyCode", "FixedWidthCode", "IndexCode", "PackedCode"]

INDEX_CODES: dict[str, IndexCode] = {
    "int32": FixedWidthCode("int32", short=False),
    "auto": FixedWidthCode("auto", short=True),
    "packed": PackedCode("packed"),
    "rice": EntropyCode("rice"),
}
