"""Signs: the majority vote, scaled signs with feedback, and the sign of a mean for the dense slots beside a vote."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, GroupPlan, GroupStep, Opened, Route, Terms
from thinwire.compress.dense import AfterMean, MeanStep
from thinwire.exchange.base import Outcome
from thinwire.exchange.majority import gather_words, pack_bits, unpack_bits, vote_by_majority
from thinwire.exchange.requests import Place, Program
from thinwire.exchange.shared_indices import sum_flags
from thinwire.kernels.cuda.signs import BITS, SignAdder, reason_against_kernels, sign_toolchain
from thinwire.kernels.inspection import holds_non_finite, inspect
from thinwire.layout import Group
from thinwire.memory.account import Account
from thinwire.memory.base import Memory, MemoryState
from thinwire.memory.residual import NoMemory
from thinwire.wire.codec import Flags


class SignAfterMean(AfterMean):
    """The sign of the plain mean."""

    def begin(self, group: Group, scale: Tensor | None) -> MeanStep:
        return SignStep(scale)


class SignStep(MeanStep):
    def __init__(self, scale: Tensor | None) -> None:
        self._scale = scale

    def finish(self, outcome: Outcome) -> Outcome:
        mean = outcome.update
        # Not-a-number has no sign: it has to be seen before.
        return Outcome(with_scale(mean.sign(), self._scale), ~mean.isfinite().all())


class SignPlan(GroupPlan):
    """A group whose route is the same in every step."""

    def __init__(self, route: Route) -> None:
        super().__init__(route.group)
        self._route = route

    def route(self, modes: Hashable) -> Route:
        return self._route


class VoteCompressor(Compressor):
    """The sign of the gradient is all that is sent and all that arrives."""

    def __init__(self, abstain: bool) -> None:
        self.abstain = abstain

    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        return SignPlan(VoteRoute(group, terms.place, self.abstain))


class SignRoute(Route):
    """Torch adds memory. Signs are written, counted, read and added by kernels where there are some."""

    def __init__(self, group: Group, place: Place, slot_bytes: Sequence[float]) -> None:
        super().__init__(group, slot_bytes, [slot.numel for slot in group.slots])
        self.place = place
        self.objection = self._reason_against_kernels()
        if self.objection is None:
            self.backend = "torch, then CUDA kernels"

    def _reason_against_kernels(self) -> str | None:
        return reason_against_kernels(self.group.device, self.group.dtype, self.group.numel)


class VoteRoute(SignRoute):
    def __init__(self, group: Group, place: Place, abstain: bool) -> None:
        bits = 2 if abstain else 1
        per_element = 2 * (place.world - 1) / place.world * bits / 8
        super().__init__(group, place, [per_element * slot.numel for slot in group.slots])
        self.abstain = abstain
        self._nothing = NoMemory().start()

    def _reason_against_kernels(self) -> str | None:
        return (
            "there is nobody to vote with"
            if self.place.world == 1
            else super()._reason_against_kernels()
        )

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        c = self._nothing.compensate(self.group, gradients, step.scale).c
        return Opened(self._run(c, flags, step.scale))

    def _run(self, c: Tensor, flags: Flags, scale: Tensor | None) -> Program[Outcome]:
        used, non_finite = yield from sum_flags(flags, self.place, "signs")
        verdict = yield from vote_by_majority(c, self.place, self.abstain, "signs")
        update = verdict.to(c.dtype)
        torch._foreach_mul_(self.group.spans(update), list(used.to(c.dtype).unbind()))
        return Outcome(with_scale(update, scale), non_finite)


class ScaledSignCompressor(Compressor):
    """sign(c) x mean|c| per slot from every rank, averaged; what that leaves of c is the residual."""

    def __init__(self, memory: Memory) -> None:
        self.memory: MemoryState = memory.start()

    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        return SignPlan(ScaledSignRoute(group, terms.place, self.memory))


class ScaledSignRoute(SignRoute):
    def __init__(self, group: Group, place: Place, memory: MemoryState) -> None:
        numels = [slot.numel for slot in group.slots]
        super().__init__(group, place, [(place.world - 1) * (numel / 8 + 8) for numel in numels])
        self.memory = memory
        self._lengths = torch.tensor([float(n) for n in numels], device=group.device)

    @cached_property
    def code(self) -> SignCode:
        """Made at the first step, for which kernels are compiled."""
        group = self.group
        toolchain = sign_toolchain(group.device, group.dtype, group.numel)
        return TorchSigns(group) if toolchain is None else SignAdder(group, toolchain)

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        account = self.memory.compensate(self.group, gradients, step.scale)
        return Opened(self._run(account, flags), account)

    def _run(self, account: Account, flags: Flags) -> Program[Outcome]:
        c, count = account.c, len(self.group.slots)
        scales = self._mean_magnitudes(c)
        overflow = holds_non_finite(scales)
        sent = SentSigns(self.code, self.code.write(c), torch.nan_to_num(scales, 0.0, 0.0, 0.0))
        sent.take_out_of(c)
        account.write_off_all(sent)
        bits = [flags.had_gradient, (flags.non_finite | overflow)[None]]
        words = torch.cat([scales, *(bit.float() for bit in bits)])
        all_words, all_signs = yield from gather_words(words, sent.signs, self.place, "signs")
        used = all_words[:, count:-1].any(0)
        sent.give_back_slots(c, used)
        update = torch.zeros_like(c)
        self.code.add(update, all_signs, all_words[:, :count] * used)
        return Outcome(update.mul_(1 / self.place.world), all_words[:, -1].any())

    def _mean_magnitudes(self, c: Tensor) -> Tensor:
        """float32 [slots]"""
        spans = self.group.spans(c)
        if c.device.type == "cpu":
            # Many times faster there than a norm, which is not vectorised.
            return torch.stack([span.abs().mean() for span in spans]).float()
        return torch.stack(list(torch._foreach_norm(spans, 1))).float() / self._lengths


class SignCode(Protocol):
    """How the signs of a group's buffer are written down, and added to such a buffer again."""

    def write(self, c: Tensor) -> Tensor:
        """uint8: a bit for each element, up if it is not negative."""

    def add(self, flat: Tensor, signs: Tensor, scales: Tensor) -> None:
        """Add every row's signs, times the row's scale of the slot, row by row; uint8 [rows, bytes], float32 [rows, slots]."""


class TorchSigns:
    """The definition of a `SignCode`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def write(self, c: Tensor) -> Tensor:
        padded = torch.zeros(-(-c.numel() // BITS) * BITS, dtype=torch.bool, device=c.device)
        padded[: c.numel()] = c >= 0
        return pack_bits(padded)

    def add(self, flat: Tensor, signs: Tensor, scales: Tensor) -> None:
        for row, its_scales in zip(signs, scales, strict=True):
            chosen = unpack_bits(row)[: flat.numel()]
            flat += torch.where(chosen, 1.0, -1.0).to(flat.dtype) * spread(
                its_scales, self.group, flat
            )


class SentSigns:
    """Scaled signs that were sent, one for every element."""

    def __init__(self, code: SignCode, signs: Tensor, scales: Tensor) -> None:
        self.code = code
        self.signs = signs
        self.scales = scales
        """float32 [slots]"""
        self._accepted = scales
        """The same; 0 of slots that were given back. Beside the others, which have to live as long as streams read them."""

    def take_out_of(self, c: Tensor) -> None:
        self._add(c, -self.scales)

    def give_back_slots(self, c: Tensor, used: Tensor) -> None:
        """What was sent of slots that are not used returns."""
        self._add(c, torch.where(used, 0.0, self.scales))
        self._accepted = torch.where(used, self.scales, 0.0)

    def return_to(self, c: Tensor, flag: Tensor) -> None:
        self._add(c, torch.where(flag, self._accepted, 0.0))

    def add_to(self, total: Tensor) -> None:
        self._add(total, self._accepted)

    def _add(self, flat: Tensor, scales: Tensor) -> None:
        self.code.add(flat, self.signs[None], scales[None])


def with_scale(signs: Tensor, scale: Tensor | None) -> Tensor:
    """Signs have no size, but a GradScaler will divide by its scale."""
    return signs if scale is None else signs * scale.to(signs.dtype)


def spread(per_slot: Tensor, group: Group, like: Tensor) -> Tensor:
    """One number per slot -> one per element of the group's buffer, 0 between the slots."""
    flat = torch.zeros_like(like)
    for index, slot in enumerate(group.slots):
        slot.span(flat).copy_(per_slot[index].expand(slot.numel))
    return flat
