"""Method: hyper-parameters of a published method and the parts it is composed of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from thinwire.compressor import Compressor, DenseCompressor, SparseCompressor
from thinwire.exchange.base import Exchange
from thinwire.exchange.gather import AllGatherFast
from thinwire.layout import Slot
from thinwire.memory.base import Memory
from thinwire.memory.residual import Residual
from thinwire.select.base import Selector
from thinwire.validate import check_bool, check_choice, check_density, check_instance
from thinwire.wire.format import Wire

# Below this size a slot's header and launch cost more than its bytes.
SMALL_NUMEL = 512


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A frozen, validated description of how gradients are sent."""

    @property
    def host_sync_free(self) -> bool:
        """Whether a step on an accelerator never makes the host wait."""
        return True

    @abstractmethod
    def compressor(self) -> Compressor:
        """A fresh runtime of this method."""

    @abstractmethod
    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        """Why this slot had better go dense, or None if it is worth compressing."""

    @abstractmethod
    def describe(self, slot: Slot) -> str:
        """What happens to this slot, in a few words for `handle.plan()`."""


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """The plain mean, as DDP sends it.

    `dtype` narrows the wire (torch.bfloat16, torch.float16) like torch's own compression hooks; the rounding is then
    lost by design, as it is there.
    """

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, (None, torch.bfloat16, torch.float16))

    def compressor(self) -> Compressor:
        return DenseCompressor(self.dtype)

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        return None

    def describe(self, slot: Slot) -> str:
        return "dense" if self.dtype is None else f"dense, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, kw_only=True)
class SparseMethod(Method):
    """memory -> select -> wire -> exchange, with the break-even against a dense all-reduce."""

    memory: Memory = field(default_factory=Residual)
    """What happens to entries that are not sent."""
    exchange: Exchange = field(default_factory=AllGatherFast)
    """How the payload travels."""
    dense_fallback: bool = True
    """Whether a slot that would not pay may go dense."""

    def __post_init__(self) -> None:
        check_instance("memory", self.memory, Memory, "a memory such as tw.Residual()")
        check_instance(
            "exchange", self.exchange, Exchange, "an exchange such as tw.AllGatherFast()"
        )
        check_bool("dense_fallback", self.dense_fallback)

    @abstractmethod
    def selector(self) -> Selector: ...

    @abstractmethod
    def wire_format(self) -> Wire: ...

    def compressor(self) -> Compressor:
        wire = self.wire_format()
        return SparseCompressor(
            self.selector(), self.memory, wire.value_code, wire.index_code, self.exchange
        )

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        """All-gather sends (world-1) b k bytes, a ring all-reduce 2 (world-1)/world n bytes."""
        if not self.dense_fallback:
            return None
        if slot.numel < SMALL_NUMEL:
            return f"fewer than {SMALL_NUMEL} elements"
        rows = self.selector().rows(slot, None)
        realised = rows.entries / slot.numel
        break_even = 2 * dense_bits / (self.wire_format().bits_per_entry(rows) * world)
        if realised >= break_even:
            return (
                f"would send {realised:.2%} of its entries, more than the {break_even:.2%} "
                f"at which an all-gather among {world} workers stops paying"
            )
        return None

    def describe(self, slot: Slot) -> str:
        rows = self.selector().rows(slot, None)
        feedback = "" if self.memory.keeps_state else ", no feedback"
        return (
            f"{type(self).__name__}: {rows.keep} of {rows.length} in each of {rows.count} {rows.what}"
            f" ({rows.entries / slot.numel:.2%}){feedback}"
        )


@dataclass(frozen=True, kw_only=True)
class Sparsifier(SparseMethod):
    """What the published sparsifying methods share."""

    density: float = 0.01
    """Fraction of the entries kept; what is really sent is in `handle.stats()`."""
    values: str = "bf16"
    """Value code on the wire. bf16 by default: it has the range of gradients, and its rounding stays in memory."""
    indices: str = "auto"
    """Index code on the wire: "auto" takes 16 bits inside short rows, 32 otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density("density", self.density)
        self.wire_format()

    def wire_format(self) -> Wire:
        return Wire(values=self.values, indices=self.indices)


@dataclass(frozen=True, kw_only=True)
class Compose(SparseMethod):
    """A method put together by hand from its parts."""

    select: Selector
    """Which entries are sent, such as tw.AllDimensionTopK(0.01)."""
    wire: Wire = field(default_factory=Wire)
    """How they are written down."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_instance("select", self.select, Selector, "a selection such as tw.TradTopK(0.01)")
        check_instance("wire", self.wire, Wire, "a format such as tw.Wire(values='fp16')")

    def selector(self) -> Selector:
        return self.select

    def wire_format(self) -> Wire:
        return self.wire
