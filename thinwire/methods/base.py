"""Method: hyper-parameters of a published method and the parts it is composed of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from thinwire.compress.base import Compressor
from thinwire.compress.dense import DenseCompressor
from thinwire.compress.dense_momentum import MomentumAfterMean
from thinwire.compress.sparse import SparseCompressor
from thinwire.described import Described
from thinwire.errors import UsageError
from thinwire.exchange.all_gather import AllGather
from thinwire.exchange.base import Exchange
from thinwire.layout import Slot, SlotRows
from thinwire.memory.base import Memory
from thinwire.memory.clip import Clip
from thinwire.memory.residual import NoMemory, Residual
from thinwire.methods.schedule import Schedule
from thinwire.select.base import Selector
from thinwire.validate import check_bool, check_choice, check_density, check_instance
from thinwire.wire.format import Wire

# Below this size a slot's header and launch cost more than its bytes, and 1 % of it is a handful of entries: the classifier of a
# small network learns nothing from six of its 640 weights.
SMALL_NUMEL = 1024
MOMENTUM_TAKEOVER = "momentum"
ADAM_TAKEOVER = "Adam"
USUAL_MOMENTUM = 0.9
WORTHWHILE = 0.9
"""Of the dense bytes: selection takes time and holds gradients back, which less than a tenth of the bytes is not worth."""


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """How a method that measures and chooses is to do so."""

    quality: str = "safe"
    """The boldest class of candidates, where no methods are named."""
    among: tuple[Method, ...] = ()
    """Choose among these and dense; empty = whatever `quality` allows."""
    measure_s: float = 10.0
    """Seconds of steps that are measured at most, in no fewer than three steps."""
    measure_steps: int = 30
    """Steps that are measured at most."""
    finalists: int = 3
    """Plans that are tried before one of them is kept."""
    trial_steps: int = 5
    """Timed steps of each trial."""
    window: int = 200
    """Steps after which the time of a step is compared with what was expected."""


@dataclass(frozen=True, kw_only=True)
class Method(Described, ABC):
    """A frozen, validated description of how gradients are sent."""

    is_dense: ClassVar[bool] = False
    """Whether every element is sent."""
    selects: ClassVar[bool] = False
    """Whether it chooses entries by a `selector()`."""

    @property
    def suits_adam(self) -> bool:
        """Whether Adam behind it divides by about the size of gradients all the same, or its step is taken over."""
        return self.takes_over == ADAM_TAKEOVER

    @property
    def host_sync_free(self) -> bool:
        """Whether a step on an accelerator never makes the host wait."""
        return True

    @property
    def host_sizes(self) -> frozenset[int]:
        """Ranks per host, where it asks for something inside or between hosts; empty where hosts are all the same to it."""
        return frozenset()

    @property
    def owns_momentum(self) -> bool:
        """Whether momentum is applied here, so that the optimizer's has to be taken over."""
        return False

    @property
    def takes_over(self) -> str | None:
        """What has to be taken over from the optimizer, by its name in `thinwire.optim`; None = nothing."""
        return MOMENTUM_TAKEOVER if self.owns_momentum else None

    def with_momentum(self, momentum: float, nesterov: bool) -> Method:
        """The same method with what was taken over from the optimizer; one that owns no momentum stays as it is."""
        return self

    @property
    def rehearsal(self) -> Method:
        """What stands for it where only bytes and time count: the same with usual figures in place of what is taken over."""
        return self.with_momentum(USUAL_MOMENTUM, False)

    @property
    def seldom(self) -> tuple[int, Method] | None:
        """(n, what stands for it in every n-th step), for a method that sends more in some steps; None where all are alike."""
        return None

    def in_scale(self, memory: Memory) -> Method:
        """The same method with this memory, in whose divisor's scale it compares magnitudes."""
        raise UsageError(
            f"method is {type(self).__name__}, which cannot work in the scale of an optimizer; use tw.TopK, tw.ADTopK "
            "or another one that selects, tw.Quantized, or a low-rank method"
        )

    def dense_companion(self, dense: Dense) -> Method:
        """What this method's dense slots use in place of `dense`."""
        return dense

    def beside(self, owner: Method) -> Method:
        """What this method is for some parameters of a model whose method is `owner`: a dense one is its dense companion."""
        return self

    def exempt(self, sizes: Mapping[str, int]) -> frozenset[str]:
        """Parameters that it leaves dense, judged by the elements of all that it might compress."""
        return frozenset()

    @property
    def adaptive(self) -> Adaptive | None:
        """How it chooses among others from measured steps; None for a method that is what it is. It starts as `at(0)`."""
        return None

    @property
    def turns(self) -> tuple[int, ...]:
        """Steps at which another method takes over, so that each can be checked beforehand."""
        return ()

    def at(self, step: int) -> Method:
        """The method in force in a handle's step; another one from time to time where a schedule says so."""
        return self

    def changed(self, change: Callable[[Method], Method]) -> Method:
        """With a change made to what it compresses by."""
        return change(self)

    def without_memory(self) -> Method:
        """The same method holding nothing back; one that has no such setting stays as it is."""
        return self

    @abstractmethod
    def compressor(self) -> Compressor:
        """A fresh runtime of this method."""

    @abstractmethod
    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        """Why this parameter had better travel dense; None if it is worth compressing."""

    @abstractmethod
    def describe(self, slot: Slot) -> str:
        """What happens to this parameter, in a few words for `handle.plan()`."""


def check_method(method: Any) -> None:
    """Refuse what is no method, and say what was probably meant."""
    if isinstance(method, Method):
        return
    allowed = "it must be a method such as tw.ADTopK(density=0.01)"
    if isinstance(method, type) and issubclass(method, Method):
        raise UsageError(
            f"method is the class {method.__name__}; it must be one with its settings, as tw.{method.__name__}(...)"
        )
    if hasattr(method, "param_groups"):
        raise UsageError(
            f"method is an optimizer, {type(method).__name__}; {allowed}, and an optimizer is passed as optimizer="
        )
    raise UsageError(f"method is {method!r}; {allowed}")


def refuse_choosing(field: str, method: Method, what: str) -> None:
    """Refuse a method that measures and chooses where nobody would have it do so: it would stay dense."""
    if method.adaptive is not None:
        raise UsageError(
            f"{field} has {method!r}, which measures steps and chooses by itself; it cannot be {what}, so use it alone"
        )


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """The plain mean, as DDP sends it.

    `dtype` narrows the wire (torch.bfloat16, torch.float16) like torch's own compression hooks; the rounding is then
    lost by design, as it is there.
    """

    dtype: torch.dtype | None = None

    is_dense = True

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, (None, torch.bfloat16, torch.float16))

    @property
    def suits_adam(self) -> bool:
        return True

    def in_scale(self, memory: Memory) -> Method:
        return self

    def beside(self, owner: Method) -> Method:
        return owner.dense_companion(self)

    def compressor(self) -> Compressor:
        return DenseCompressor(self.dtype)

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        return None

    def describe(self, slot: Slot) -> str:
        return "dense" if self.dtype is None else f"dense, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, kw_only=True)
class DenseMomentum(Dense):
    """The plain mean with momentum after it: the dense slots of a method that owns momentum."""

    momentum: float
    nesterov: bool = False
    clip: Clip | None = None

    @property
    def owns_momentum(self) -> bool:
        return True

    def compressor(self) -> Compressor:
        after = MomentumAfterMean(self.momentum, self.nesterov)
        return DenseCompressor(self.dtype, after, self.clip)

    def dense_companion(self, dense: Dense) -> Method:
        return replace(self, dtype=dense.dtype)

    def describe(self, slot: Slot) -> str:
        return f"{super().describe(slot)}, momentum after averaging"


@dataclass(frozen=True, kw_only=True)
class SparseMethod(Method):
    """memory -> select -> wire -> exchange, with the break-even against a dense all-reduce."""

    memory: Memory = field(default_factory=Residual)
    """What happens to entries that are not sent."""
    exchange: Exchange = field(default_factory=AllGather)
    """How the payload travels."""
    dense_fallback: bool = True
    """Whether a parameter may travel dense where compressing it would not pay."""

    selects = True

    def __post_init__(self) -> None:
        check_instance("memory", self.memory, Memory, "a memory such as tw.memory.Residual()")
        check_instance(
            "exchange", self.exchange, Exchange, "an exchange such as tw.exchange.AllGather()"
        )
        check_bool("dense_fallback", self.dense_fallback)

    @property
    def host_sync_free(self) -> bool:
        return self.exchange.host_sync_free

    @property
    def host_sizes(self) -> frozenset[int]:
        return self.exchange.host_sizes

    @abstractmethod
    def selector(self) -> Selector: ...

    @abstractmethod
    def wire_format(self) -> Wire: ...

    @property
    def suits_adam(self) -> bool:
        # With 1.0 nothing is held back.
        return getattr(self, "density", None) == 1 or super().suits_adam

    @property
    def owns_momentum(self) -> bool:
        return self.memory.owns_momentum

    def with_momentum(self, momentum: float, nesterov: bool) -> Method:
        return replace(self, memory=self.memory.with_momentum(momentum, nesterov))

    def in_scale(self, memory: Memory) -> Method:
        if not self.exchange.keeps_choice:
            raise UsageError(
                f"exchange is {type(self.exchange).__name__}, which compares what several ranks send; in the scale of an "
                "optimizer it must be tw.exchange.AllGather()"
            )
        return replace(self, memory=memory)

    def without_memory(self) -> Method:
        return replace(self, memory=NoMemory())

    def dense_companion(self, dense: Dense) -> Method:
        applied = self.memory.correction
        if applied is None:
            return dense
        return DenseMomentum(
            dtype=dense.dtype, momentum=applied.momentum, nesterov=applied.nesterov
        )

    def _check_fit(self) -> None:
        """Refuse a selection or wire format that the exchange cannot carry."""
        objection = self.exchange.objection(self.selector())
        if objection is not None:
            raise UsageError(f"exchange is {type(self.exchange).__name__}, which {objection}")
        if self.memory.masks_momentum and self.exchange.moves_memory:
            raise UsageError(
                f"masking is True, but {type(self.exchange).__name__} moves what is held back between ranks, so that "
                "nobody knows where to mask; use tw.memory.MomentumCorrection(masking=False)"
            )
        if not self.exchange.sums_on_the_way:
            return
        exchange = type(self.exchange).__name__
        if self.wire_format().value_code.dtype is None:
            raise UsageError(
                f"values is {self.wire_format().values!r}; {exchange} adds values on the way, so they must be "
                "'fp32', 'bf16' or 'fp16'"
            )
        if self.selector().note_words:
            raise UsageError(
                f"exchange is {exchange}, which carries no selection notes; {type(self.selector()).__name__} "
                "needs an all-gather such as tw.exchange.AllGather()"
            )

    def compressor(self) -> Compressor:
        self._check_fit()
        wire = self.wire_format()
        return SparseCompressor(
            self.selector(),
            self.memory,
            wire.value_code,
            wire.index_code,
            self.exchange,
            self.local_clip,
        )

    @property
    def local_clip(self) -> Clip | None:
        """How local gradients are clipped before memory sees them."""
        return None

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        """The exchange's own count of bits per entry against a ring all-reduce's 2 (world-1)/world n."""
        # Before anything else, because an axis that the slot does not have must be refused at attach.
        rows = self.selector().rows(slot, None)
        if not self.dense_fallback:
            return None
        if slot.numel < SMALL_NUMEL:
            return f"fewer than {SMALL_NUMEL} elements"
        realised = rows.entries / slot.numel
        break_even = self._break_even(rows, dense_bits, world)
        if realised >= break_even:
            return (
                f"would send {realised:.2%} of its entries, more than the {break_even:.2%} "
                f"at which {type(self.exchange).__name__} among {world} workers stops paying"
            )
        if rows.entries >= slot.numel:
            return "would send all of its entries"
        return None

    def _break_even(self, rows: SlotRows, dense_bits: int, world: int) -> float:
        """The density at which this exchange no longer sends worthwhile fewer bits than a dense all-reduce."""
        wire = self.wire_format()
        if world == 1:
            return 2 * dense_bits / wire.bits_per_entry(rows)
        sparse = self.exchange.entry_bits(wire.value_code.bits, wire.index_code.bits(rows), world)
        return WORTHWHILE * 2 * (world - 1) / world * dense_bits / sparse

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

    density: float | Schedule = 0.01
    """Fraction of the entries kept, or a schedule of it; what is really sent is in `handle.stats()`."""
    values: str = "bf16"
    """Value code on the wire. bf16 by default: it has the range of gradients, and its rounding stays in memory."""
    indices: str = "auto"
    """Index code on the wire: "auto" takes 16 bits inside short rows, 32 otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.density, Schedule):
            check_density("density", self.density)
        self.wire_format()

    def at(self, step: int) -> Method:
        if not isinstance(self.density, Schedule):
            return self
        density = self.density.at(step)
        return self.dense_companion(Dense()) if density >= 1.0 else replace(self, density=density)

    @property
    def kept(self) -> float:
        """The density as a number; under a schedule the last one, which is where it ends."""
        return self.density.final if isinstance(self.density, Schedule) else self.density

    def describe(self, slot: Slot) -> str:
        rows = self.selector().rows(slot, None)
        each = " in each" if rows.count > 1 else ""
        raised = f", raised to one entry{each}" if self.kept * rows.length < 1 else ""
        return super().describe(slot) + raised

    def wire_format(self) -> Wire:
        return Wire(values=self.values, indices=self.indices)


@dataclass(frozen=True, kw_only=True)
class Compose(SparseMethod):
    """A method put together by hand from its parts."""

    select: Selector
    """Which entries are sent, such as tw.select.AllDimensionTopK(0.01)."""
    wire: Wire = field(default_factory=Wire)
    """How they are written down."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_instance(
            "select", self.select, Selector, "a selection such as tw.select.TradTopK(0.01)"
        )
        check_instance("wire", self.wire, Wire, "a format such as tw.wire.Wire(values='fp16')")

    def selector(self) -> Selector:
        return self.select

    def wire_format(self) -> Wire:
        return self.wire
