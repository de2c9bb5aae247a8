"""Quantized: every element in 16, 8, 4, 2 or 1 bits, summed in float32.

The exchange is that of ZeRO++'s qgZ (Wang et al., 2023) and of LoCo and SDP4Bit (2024): an all-to-all of codes, sums at
their owners, an all-gather of coded sums. Here both roundings stay in memory, so that nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from thinwire.compress.base import Compressor
from thinwire.compress.quantized import QuantizedCompressor
from thinwire.errors import UsageError
from thinwire.layout import Slot
from thinwire.memory.base import Memory
from thinwire.memory.residual import NoMemory, Residual
from thinwire.methods.base import SMALL_NUMEL, WORTHWHILE, Method
from thinwire.validate import check_bool, check_choice, check_instance, check_positive_int
from thinwire.wire.quantize import QUANTIZERS, BlockQuantizer

BLOCKS = (32, 64, 128, 256, 512, 1024)
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Quantized(Method):
    """Blocks of small codes with one bfloat16 scale each. The sums are made in float32 and quantised once more."""

    bits: int | str = 8
    """Per element: 8 and 4 are whole numbers, 2 is -1, 0 or 1, 1 is the sign times the mean magnitude, 16 is bfloat16 without
    scales; "fp8" is an 8-bit floating-point number (e4m3)."""
    block: int = 128
    """Elements that share a scale: a power of two from 32 to 1024."""
    memory: Memory = field(default_factory=Residual)
    """tw.memory.Residual() keeps what both roundings lose; tw.memory.NoMemory() drops it."""
    rounding: str = "nearest"
    """"nearest" or "stochastic", whose draws are a hash of parameter, place, step and rank."""
    sum_bits: int | str | None = None
    """Of the sums that owners send to all; None = as many as `bits`."""
    dense_fallback: bool = True
    """Whether a parameter may travel dense where compressing it would not pay."""
    per_host: int | None = None
    """Ranks per host, to sum in full precision inside each host and in a few bits between hosts; None = over all ranks at
    once. The ranks of a host must have consecutive numbers: host = rank // per_host, as torchrun numbers them."""

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, QUANTIZERS)
        check_choice("sum_bits", self.sum_bits, (None, *QUANTIZERS))
        check_choice("block", self.block, BLOCKS)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_bool("dense_fallback", self.dense_fallback)
        check_instance("memory", self.memory, Memory, "a memory such as tw.memory.Residual()")
        if self.memory.owns_momentum:
            raise UsageError(
                f"memory is {self.memory!r}; Quantized takes tw.memory.Residual() or tw.memory.NoMemory()"
            )
        if self.per_host is not None:
            check_positive_int("per_host", self.per_host)

    @property
    def host_sizes(self) -> frozenset[int]:
        return frozenset() if self.per_host is None else frozenset({self.per_host}) - {1}

    @property
    def quantizer(self) -> BlockQuantizer:
        return QUANTIZERS[self.bits]

    @property
    def sum_quantizer(self) -> BlockQuantizer:
        return self.quantizer if self.sum_bits is None else QUANTIZERS[self.sum_bits]

    @property
    def bits_per_element(self) -> float:
        """On the wire, the mean of both ways, the scales included."""
        both = (self.quantizer, self.sum_quantizer)
        return sum(one.bits_per_element(self.block) for one in both) / 2

    @property
    def suits_adam(self) -> bool:
        """With fewer bits most of a gradient is as small as the rounding, and comes late."""
        return min(self.quantizer.bits, self.sum_quantizer.bits) >= 4

    def in_scale(self, memory: Memory) -> Method:
        return replace(self, memory=memory)

    def without_memory(self) -> Method:
        return replace(self, memory=NoMemory())

    def compressor(self) -> Compressor:
        return QuantizedCompressor(
            self.quantizer,
            self.block,
            self.memory,
            stochastic=self.rounding == "stochastic",
            per_host=self.per_host or 1,
            sum_quantizer=self.sum_quantizer,
        )

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        if not self.dense_fallback:
            return None
        if slot.numel < SMALL_NUMEL:
            return f"fewer than {SMALL_NUMEL} elements"
        if self.bits_per_element > WORTHWHILE * dense_bits:
            return (
                f"{self.bits_per_element:.4g} bits per element are not worth it "
                f"beside {dense_bits} of a gradient"
            )
        return None

    def describe(self, slot: Slot) -> str:
        blocks = f" in blocks of {self.block}" if self.quantizer.scale_bytes else ""
        feedback = "" if self.memory.keeps_state else ", no feedback"
        rounding = ", rounded stochastically" if self.rounding == "stochastic" else ""
        return (
            f"Quantized: {self.bits_per_element:.4g} bits per element{blocks}{rounding}{feedback}"
        )
