"""Layout: where parameters lie in flat buffers. Buckets and slots, groups of slots, rows inside slots."""

from thinwire.layout.groups import Cuts, Group
from thinwire.layout.owned_blocks import OwnedBlocks
from thinwire.layout.parameters import (
    ParameterInfo,
    canonical_name,
    contiguous_strides,
    describe_module,
    describe_parameters,
    kind_from_shape,
    kind_in_module,
    lay_out,
    local_part,
    memory_strides,
    wide_dtype,
)
from thinwire.layout.rows import (
    FLATTEN_OUTPUT,
    WHOLE_TENSOR,
    Axis,
    RowTable,
    SlotRows,
    keep_count,
    remembered,
    resolve_axis,
    rows_along,
    rows_in_chunks,
)
from thinwire.layout.slots import Bucket, BucketLayout, Shard, Slot, SlotKind

__all__ = [
    "FLATTEN_OUTPUT",
    "WHOLE_TENSOR",
    "Axis",
    "Bucket",
    "BucketLayout",
    "Cuts",
    "Group",
    "OwnedBlocks",
    "ParameterInfo",
    "RowTable",
    "Shard",
    "Slot",
    "SlotKind",
    "SlotRows",
    "canonical_name",
    "contiguous_strides",
    "describe_module",
    "describe_parameters",
    "keep_count",
    "kind_from_shape",
    "kind_in_module",
    "lay_out",
    "local_part",
    "memory_strides",
    "remembered",
    "resolve_axis",
    "rows_along",
    "rows_in_chunks",
    "wide_dtype",
]
