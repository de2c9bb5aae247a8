"""Wire formats: how the chosen entries are written down."""

from thinwire.wire.codec import Codec, Flags, Header
from thinwire.wire.entropy import EntropyCode
from thinwire.wire.fixed import FIXED_WIDTH, PACKED_BITS, IndexCode
from thinwire.wire.floats import FLOATS, ValueCode
from thinwire.wire.format import Wire
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

__all__ = [
    "FIXED_WIDTH",
    "FLOATS",
    "INDEX_CODES",
    "PACKED_BITS",
    "VALUE_CODES",
    "Codec",
    "EntropyCode",
    "Flags",
    "Header",
    "IndexCode",
    "ValueCode",
    "Wire",
]
