"""AdamMomentum: Adam's momentum on every rank, before compression, and the second moment that says in which scale Adam steps.

    u = beta1 u + (1 - beta1) g;  c = residual + u;  sent: q, a part of c;  residual = c - q

The optimizer applies w = w - lr / (1 - beta1^t) x mean(q) / (sqrt(v) + eps). All of u, c and q are in units of gradients, so that
nothing is lost when v changes. v is the second moment with its bias corrected, as it was in AdamW's last dense step, or
refreshed from the mean of raw gradients: after n of AdamW's steps its start from 0 has the weight W = beta2^n, and a refresh that
counts for k steps makes of it

    w = beta2^k;  a = w (1 - W) / (1 - w W);  v = a v + (1 - a) mean(g)^2;  W = w W

which for k = 1 in every step is AdamW's own second moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.described import Described
from thinwire.errors import UsageError
from thinwire.kernels.cuda.quantize import Scaling
from thinwire.kernels.cuda.second_moment import learn_moments
from thinwire.kernels.cuda.toolchain import has_kernels
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import SCALED, Memory, MemoryState
from thinwire.memory.momentum import (
    MomentumAccount,
    MomentumCorrection,
    accumulate,
    check_momentum,
)
from thinwire.memory.refresh import Refresh
from thinwire.memory.storage import STORAGES, make_store
from thinwire.memory.store import FlatStore
from thinwire.select.scaled import Divisor
from thinwire.validate import (
    check_choice,
    check_finite_number,
    check_instance,
    check_positive_number,
)

SECOND_MOMENT = "second_moment"
"""The store of v: bias-corrected, in plain units, the same on all ranks."""


@dataclass(frozen=True)
class AdamSettings(Described):
    """What is taken over from Adam, and what it had learned by then; the same on all ranks."""

    beta1: float
    """Of the momentum."""
    beta2: float
    """Of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    learned: int
    """Steps of the optimizer in the second moment that was taken over."""
    since: int
    """Exchanges before that."""

    def __post_init__(self) -> None:
        check_momentum("betas", self.beta1)
        check_momentum("betas", self.beta2)
        check_positive_number("eps", self.eps)


@dataclass(frozen=True)
class AdamMomentum(Memory):
    """Momentum before compression, with Adam's second moment as the scale in which selections choose.

    `tw.AdamScale` gives it to its method; `attach(..., optimizer=opt)` fills in what is taken over.
    """

    refresh: Refresh | None = None
    """How the second moment learns on; None = it stays as it was taken over."""
    limit: float | None = None
    """The most that a rank sends of an element, in units of its divisor; what is above stays in its residual. None = no limit."""
    floor: float = 0.0
    """The least second moment of an element, as a share of the mean over its tensor."""
    storage: str = "fp32"
    """The format in which momentum and residual are stored: "fp32", "bf16" or "int8" in blocks."""
    adam: AdamSettings | None = None
    """Taken over from the optimizer; None until then."""

    form = SCALED

    def __post_init__(self) -> None:
        check_choice("storage", self.storage, STORAGES)
        if self.refresh is not None:
            check_instance("refresh", self.refresh, Refresh, "such as tw.memory.Refresh(every=50)")
        if self.limit is not None:
            check_positive_number("limit", self.limit)
        check_finite_number("floor", self.floor)
        if not 0.0 <= self.floor <= 1.0:
            raise UsageError(f"floor is {self.floor!r}; it must be a number from 0 to 1")

    @property
    def scaling(self) -> Scaling | None:
        if self.adam is None:
            return None
        return Scaling(self.adam.beta1, self.adam.eps, self.limit)

    def start(self) -> MemoryState:
        if self.adam is None:
            raise UsageError(
                "adam is None; AdamMomentum takes it over from the optimizer, so use tw.AdamScale(method=...) with "
                "attach(..., optimizer=opt)"
            )
        return AdamState(self, self.adam)


class AdamState(MemoryState):
    """u is the store "momentum", what is held back "residual", v "second_moment"."""

    setting: AdamMomentum

    def __init__(self, setting: AdamMomentum, adam: AdamSettings) -> None:
        self.setting = setting
        self.adam = adam
        self._momentum = MomentumCorrection(
            adam.beta1, nesterov=False, masking=False, storage=setting.storage
        )
        self.stores = {
            "momentum": make_store(setting.storage),
            "residual": make_store(setting.storage),
            SECOND_MOMENT: FlatStore(),
        }

    def compensate(
        self, group: Group, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> Account:
        bindings = self.stores["momentum"].bind(group), self.stores["residual"].bind(group)
        u, c = (binding.begin(scale) for binding in bindings)
        accumulate(u, c, group, gradients, self._momentum, gain=1 - self.adam.beta1)
        return MomentumAccount(u.now, c.now, bindings, self._momentum)

    # -- the scale -------------------------------------------------------------------------------------------------

    def due(self, names: Sequence[str], counts: Sequence[int]) -> Refresh | None:
        """Every so many exchanges of the first slot; the first so many behind the dense start, which has just taught v."""
        if any(self.stores[SECOND_MOMENT].view(name) is None for name in names):
            raise UsageError(
                f"{names[0]!r} has no second moment to divide by; load the optimizer's state as well as the handle's"
            )
        refresh = self.setting.refresh
        if refresh is None or (self._behind(counts) + 1) % refresh.every:
            return None
        return refresh

    def _behind(self, counts: Sequence[int]) -> int:
        """Exchanges since the second moment was taken over, before this one."""
        return max(0, counts[0] - self.adam.since)

    def divisor(self, group: Group, scale: Tensor | None) -> Divisor:
        v = self.stores[SECOND_MOMENT].bind(group).flat
        limit = self.setting.limit
        in_units = limit if scale is None or limit is None else limit * scale
        return Divisor(nearest_root(v).add_(self.adam.eps), in_units)

    def refresh(self, group: Group, mean: Tensor, counts: Sequence[int]) -> None:
        """v = a v + (1 - a) mean^2; where no rank had a gradient, or the square overflows, v stays."""
        refresh = self.setting.refresh
        assert refresh is not None
        kept = self.kept(refresh, self._behind(counts) // refresh.every)
        held, now, _ = self.stores[SECOND_MOMENT].bind(group).begin(None)
        if held.dtype == torch.float32 and has_kernels(group.device):
            learned = learn_moments(group, held, now, mean, kept)
        else:
            learned = learn_in_torch(group, held, now, mean, kept)
        for slot, had in zip(group.slots, learned, strict=True) if self.setting.floor else ():
            piece = slot.span(now)
            piece.copy_(torch.where(had, raise_to_floor(piece, self.setting.floor), piece))

    def kept(self, refresh: Refresh, number: int) -> float:
        """a: the weight of what v was, in the refresh of that number, counted from 0."""
        beta2 = self.adam.beta2
        start = beta2 ** (self.adam.learned + number * refresh.steps)
        kept = beta2**refresh.steps
        return kept * (1 - start) / (1 - kept * start)


def learn_in_torch(group: Group, held: Tensor, now: Tensor, mean: Tensor, kept: float) -> Tensor:
    """What `learn_moments` does by kernels."""
    learned = torch.stack([span.any() for span in group.spans(mean)])
    fresh = torch.add(held * kept, mean.square(), alpha=1 - kept)
    fresh = torch.where(fresh.isfinite(), fresh, held)
    for had, piece, old in zip(learned, group.spans(fresh), group.spans(held), strict=True):
        piece.copy_(torch.where(had, piece, old))
    now.copy_(fresh)
    return learned


def nearest_root(v: Tensor) -> Tensor:
    """The square root, rounded to nearest on every device. On a CPU torch may call a library that misses that by one place."""
    return v.double().sqrt_().to(v.dtype) if v.device.type == "cpu" else v.sqrt()


def raise_to_floor(v: Tensor, floor: float) -> Tensor:
    """v, where it is less than `floor` x its mean raised to that."""
    return v if floor == 0.0 else v.clamp(min=floor * v.mean())
