"""Signs: the majority vote, scaled signs with feedback, and the sign of a mean for the dense slots beside a vote."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, GroupPlan, GroupStep, Opened, Route, Terms
from thinwire.compress.dense import AfterMean, MeanStep
from thinwire.exchange.base import Outcome
from thinwire.exchange.majority import gather_scaled_signs, vote_by_majority
from thinwire.exchange.requests import Place, Program
from thinwire.exchange.shared_indices import sum_flags
from thinwire.kernels.inspection import inspect
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


class VoteRoute(Route):
    def __init__(self, group: Group, place: Place, abstain: bool) -> None:
        bits = 2 if abstain else 1
        per_element = 2 * (place.world - 1) / place.world * bits / 8
        numels = [slot.numel for slot in group.slots]
        super().__init__(group, [per_element * numel for numel in numels], numels)
        self.place = place
        self.abstain = abstain
        self._nothing = NoMemory().start()

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        c = self._nothing.compensate(self.group, gradients, step.scale).c
        return Opened(self._run(c, flags, step.scale))

    def _run(self, c: Tensor, flags: Flags, scale: Tensor | None) -> Program[Outcome]:
        used, non_finite = yield from sum_flags(flags, self.place, "signs")
        verdict = yield from vote_by_majority(c, self.place, self.abstain, "signs")
        update = verdict.to(c.dtype) * spread(used, self.group, c)
        return Outcome(with_scale(update, scale), non_finite)


class ScaledSignCompressor(Compressor):
    """sign(c) x mean|c| per slot from every rank, averaged; what that leaves of c is the residual."""

    def __init__(self, memory: Memory) -> None:
        self.memory: MemoryState = memory.start()

    def plan(self, group: Group, terms: Terms) -> GroupPlan:
        return SignPlan(ScaledSignRoute(group, terms.place, self.memory))


class ScaledSignRoute(Route):
    def __init__(self, group: Group, place: Place, memory: MemoryState) -> None:
        numels = [slot.numel for slot in group.slots]
        super().__init__(group, [(place.world - 1) * (numel / 8 + 8) for numel in numels], numels)
        self.place = place
        self.memory = memory

    def open(self, step: GroupStep) -> Opened:
        flags, gradients = inspect(self.group, step.bucket_flat)
        account = self.memory.compensate(self.group, gradients, step.scale)
        return Opened(self._run(account, flags), account)

    def _run(self, account: Account, flags: Flags) -> Program[Outcome]:
        group, c = self.group, account.c
        scales = torch.stack([slot.span(c).abs().mean() for slot in group.slots]).float()
        overflow = ~scales.isfinite().all()
        signs = c >= 0
        sent = SentSigns(torch.nan_to_num(scaled(signs, scales, group, c), 0.0, 0.0, 0.0))
        c.sub_(sent.contribution)
        account.write_off_all(sent)
        bits = [flags.had_gradient, (flags.non_finite | overflow)[None]]
        words = torch.cat([scales, *(bit.float() for bit in bits)])
        all_words, all_signs = yield from gather_scaled_signs(signs, words, self.place, "signs")
        count = len(group.slots)
        used = all_words[:, count:-1].any(0)
        sent.give_back_slots(c, ~used, group)
        update = torch.zeros_like(c)
        for rank_words, rank_signs in zip(all_words, all_signs, strict=True):
            update += scaled(rank_signs, rank_words[:count] * used, group, c)
        return Outcome(update.mul_(1 / self.place.world), all_words[:, -1].any())


class SentSigns:
    """Scaled signs that were sent, one for every element."""

    def __init__(self, contribution: Tensor) -> None:
        self.contribution = contribution

    def give_back_slots(self, c: Tensor, unused: Tensor, group: Group) -> None:
        for index, slot in enumerate(group.slots):
            piece = slot.span(self.contribution)
            slot.span(c).add_(torch.where(unused[index], piece, 0.0))
            piece.copy_(torch.where(unused[index], 0.0, piece))

    def return_to(self, c: Tensor, flag: Tensor) -> None:
        c.add_(torch.where(flag, self.contribution, 0.0))

    def add_to(self, total: Tensor) -> None:
        total += self.contribution


def with_scale(signs: Tensor, scale: Tensor | None) -> Tensor:
    """Signs have no size, but a GradScaler will divide by its scale."""
    return signs if scale is None else signs * scale.to(signs.dtype)


def spread(per_slot: Tensor, group: Group, like: Tensor) -> Tensor:
    """One number per slot -> one per element of the group's buffer, 0 between the slots."""
    flat = torch.zeros_like(like)
    for index, slot in enumerate(group.slots):
        slot.span(flat).copy_(per_slot[index].expand(slot.numel))
    return flat


def scaled(signs: Tensor, scales: Tensor, group: Group, like: Tensor) -> Tensor:
    return torch.where(signs, 1.0, -1.0).to(like.dtype) * spread(scales, group, like)
