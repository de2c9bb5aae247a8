"""LowRankMethod: the settings PowerSGD and ACP-SGD share, and when a parameter had better travel dense."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.errors import UsageError
from thinwire.layout import Slot
from thinwire.lowrank.matrices import matrices_of
from thinwire.memory.adam import AdamMomentum
from thinwire.memory.base import Memory, MemoryState
from thinwire.methods.base import Method
from thinwire.validate import (
    check_bool,
    check_choice,
    check_instance,
    check_positive_int,
    check_positive_number,
)

WIRE_BITS = {"fp32": 32, "bf16": 16}
MAX_RANK = 65536
"""No matrix that compresses has more columns in its factors."""


@dataclass(frozen=True, kw_only=True)
class LowRankMethod(Method):
    """A gradient of n x m as the product of n x r and r x m; what the product misses stays in memory."""

    rank: int = 4
    """How many columns the factors have; a matrix with a smaller side uses the length of that side."""
    min_compression_rate: float = 2.0
    """A parameter travels dense unless it needs so many times fewer bytes than dense, averaged over steps."""
    wire: str = "fp32"
    """"fp32" or "bf16". Rounding to bf16 stays in memory; to keep it, bf16 sums take two collectives instead of one.
    Factors of float64 gradients travel in float64 under "fp32"."""
    dense_fallback: bool = True
    """Whether a parameter may travel dense where compressing it would not pay."""
    per_host: int | None = None
    """Ranks per host, to sum factors inside each host first and between hosts once per host; None = over all ranks at
    once. The ranks of a host must have consecutive numbers: host = rank // per_host, as torchrun numbers them."""

    scale: Memory | None = None
    """The memory in whose scale matrices are factorised; set by tw.AdamScale."""

    factors_per_step: ClassVar[int] = 2
    """Of the two factors, how many travel in one step."""

    def __post_init__(self) -> None:
        check_positive_int("rank", self.rank)
        if self.rank > MAX_RANK:
            raise UsageError(f"rank is {self.rank}; it must be at most {MAX_RANK}")
        check_positive_number("min_compression_rate", self.min_compression_rate)
        check_choice("wire", self.wire, tuple(WIRE_BITS))
        check_bool("dense_fallback", self.dense_fallback)
        if self.per_host is not None:
            check_positive_int("per_host", self.per_host)
        if self.scale is not None:
            check_instance(
                "scale", self.scale, AdamMomentum, "None; tw.AdamScale(method=...) sets it"
            )

    def in_scale(self, memory: Memory) -> Method:
        """What is factorised is c / divisor, and what was sent is the product x divisor."""
        assert isinstance(memory, AdamMomentum)
        if memory.limit is not None:
            raise UsageError(
                f"limit is {memory.limit!r}, but {type(self).__name__} sends factors, in which no element can be cut; it must "
                "be None"
            )
        if memory.storage != "fp32":
            raise UsageError(
                f"storage is {memory.storage!r}; with {type(self).__name__} it must be 'fp32'"
            )
        return replace(self, scale=memory)

    def start_memory(self) -> MemoryState | None:
        return None if self.scale is None else self.scale.start()

    @property
    def host_sizes(self) -> frozenset[int]:
        return frozenset() if self.per_host is None else frozenset({self.per_host}) - {1}

    def compression_rate(self, slot: Slot, dense_bits: int) -> float | None:
        """Dense bytes / bytes of the factors, averaged over steps; None if the slot is no matrix."""
        shape = matrices_of(slot)
        if shape is None:
            return None
        values = shape.count * (shape.rows + shape.columns) * shape.rank(self.rank)
        wire_bits = dense_bits if dense_bits == 64 and self.wire == "fp32" else WIRE_BITS[self.wire]
        return 2 * slot.numel * dense_bits / (self.factors_per_step * values * wire_bits)

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        """Both a dense gradient and factors travel by all-reduce, so bytes compare alike in every world."""
        rate = self.compression_rate(slot, dense_bits)
        if rate is None:
            return (
                "no matrix: fewer than two dimensions, or dimension 0 lies between others in memory"
            )
        if self.dense_fallback and not rate > self.min_compression_rate:
            return (
                f"rank {self.rank} needs {1 / rate:.2g} of the dense bytes, "
                f"not less than the 1/{self.min_compression_rate:g} asked for"
            )
        return None

    def describe(self, slot: Slot) -> str:
        shape = matrices_of(slot)
        assert shape is not None
        many = f"{shape.count} x " if shape.count > 1 else ""
        rank = shape.rank(self.rank)
        return f"{type(self).__name__}: rank {rank} of {many}{shape.rows} x {shape.columns}"
