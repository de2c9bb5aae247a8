"""SignSGD: one bit per element. With a residual it is EF-SignSGD.

Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant" (ICLR 2019).
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.compressor import Compressor, GroupStep, Opened
from thinwire.dense_compressor import DenseCompressor
from thinwire.errors import UsageError
from thinwire.exchange.base import Outcome
from thinwire.exchange.majority import gather_scaled_signs, vote_by_majority
from thinwire.exchange.requests import Program
from thinwire.exchange.shared_indices import sum_flags
from thinwire.layout import Slot
from thinwire.memory.account import Account
from thinwire.memory.base import Memory, MemoryState
from thinwire.memory.residual import NoMemory, Residual
from thinwire.methods.base import SMALL_NUMEL, Dense, Method
from thinwire.plan.groups import Group
from thinwire.validate import check_bool


@dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    """Without memory the update is the majority's sign, -1, 0 or 1; lossy by design, and the learning rate must fit.

    With `memory=tw.Residual()` every rank sends sign(c) x mean|c| of each tensor, the update is their mean, and the
    rest stays in the residual; its size is that of ordinary gradients.
    """

    memory: Memory = field(default_factory=NoMemory)
    """tw.NoMemory() for the majority vote, tw.Residual() for EF-SignSGD."""
    abstain: bool = True
    """In the vote: zeros do not vote and ties give 0, at 2 bits per element; False counts both as +1, at 1 bit."""

    def __post_init__(self) -> None:
        check_bool("abstain", self.abstain)
        if isinstance(self.memory, Residual) and self.memory.storage == "fp32":
            return
        if not isinstance(self.memory, NoMemory):
            raise UsageError(
                f"memory is {self.memory!r}; SignSGD takes tw.NoMemory() or tw.Residual() with storage='fp32'"
            )

    @property
    def votes(self) -> bool:
        return not self.memory.keeps_state

    def compressor(self) -> Compressor:
        return VoteCompressor(self.abstain) if self.votes else ScaledSignCompressor(self.memory)

    def dense_companion(self, dense: Dense) -> Method:
        """Beside a vote a dense slot takes the sign of its mean, so that one learning rate fits all."""
        return DenseSign(dtype=dense.dtype) if self.votes else dense

    def bits(self, world: int) -> float:
        """Bits a rank sends per element."""
        if self.votes:
            return 2 * (world - 1) / world * (2 if self.abstain else 1)
        return world - 1

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        if slot.numel < SMALL_NUMEL:
            return f"fewer than {SMALL_NUMEL} elements"
        if self.bits(world) > 2 * (world - 1) / world * dense_bits:
            return f"signs of {world} workers take more bits than an all-reduce"
        return None

    def describe(self, slot: Slot) -> str:
        return "SignSGD: majority vote" if self.votes else "SignSGD: scaled signs with feedback"


@dataclass(frozen=True, kw_only=True)
class DenseSign(Dense):
    """The sign of the plain mean: the dense slots beside a majority vote."""

    def compressor(self) -> Compressor:
        return DenseSignCompressor(self.dtype)

    def dense_companion(self, dense: Dense) -> Method:
        return DenseSign(dtype=dense.dtype)

    def describe(self, slot: Slot) -> str:
        return f"{super().describe(slot)}, sign of the mean"


class DenseSignCompressor(DenseCompressor):
    def open(self, step: GroupStep) -> Opened:
        opened = super().open(step)
        return replace(opened, program=self._sign(opened.program, step))

    def _sign(self, program: Program[Outcome], step: GroupStep) -> Program[Outcome]:
        mean = (yield from program).update
        # Not-a-number has no sign: it has to be seen before.
        return Outcome(with_scale(mean.sign(), step), ~mean.isfinite().all())


class VoteCompressor(Compressor):
    """The sign of the gradient is all that is sent and all that arrives."""

    def __init__(self, abstain: bool) -> None:
        self.abstain = abstain

    def open(self, step: GroupStep) -> Opened:
        c = NoMemory().start().compensate(step.group, step.gradients, step.scale).c
        per_element = 2 * (step.place.world - 1) / step.place.world * (2 if self.abstain else 1) / 8
        return Opened(
            self._run(step, c),
            None,
            [per_element * slot.numel for slot in step.group.slots],
            [slot.numel for slot in step.group.slots],
        )

    def _run(self, step: GroupStep, c: Tensor) -> Program[Outcome]:
        used, non_finite = yield from sum_flags(step.flags, step.place, "signs")
        verdict = yield from vote_by_majority(c, step.place, self.abstain, "signs")
        update = verdict.to(c.dtype) * spread(used, step.group, c)
        return Outcome(with_scale(update, step), non_finite)


class ScaledSignCompressor(Compressor):
    """sign(c) x mean|c| per slot from every rank, averaged; what that leaves of c is the residual."""

    def __init__(self, memory: Memory) -> None:
        self.memory: MemoryState = memory.start()

    def open(self, step: GroupStep) -> Opened:
        account = SignAccount(self.memory.compensate(step.group, step.gradients, step.scale).c)
        slots = step.group.slots
        return Opened(
            self._run(step, account),
            account,
            [(step.place.world - 1) * (slot.numel / 8 + 8) for slot in slots],
            [slot.numel for slot in slots],
        )

    def _run(self, step: GroupStep, account: SignAccount) -> Program[Outcome]:
        group, c = step.group, account.c
        scales = torch.stack([slot.span(c).abs().mean() for slot in group.slots]).float()
        overflow = ~scales.isfinite().all()
        signs = c >= 0
        account.write_off_all(torch.nan_to_num(scaled(signs, scales, group, c), 0.0, 0.0, 0.0))
        flags = [step.flags.had_gradient, (step.flags.non_finite | overflow)[None]]
        words = torch.cat([scales, *(flag.float() for flag in flags)])
        all_words, all_signs = yield from gather_scaled_signs(signs, words, step.place, "signs")
        count = len(group.slots)
        used = all_words[:, count:-1].any(0)
        account.give_back_slots(~used, group)
        update = torch.zeros_like(c)
        for rank_words, rank_signs in zip(all_words, all_signs, strict=True):
            update += scaled(rank_signs, rank_words[:count] * used, group, c)
        return Outcome(update.mul_(1 / step.place.world), all_words[:, -1].any())


class SignAccount(Account):
    """An account in which every element is sent."""

    def __init__(self, c: Tensor) -> None:
        super().__init__(c)
        self._all = torch.zeros_like(c)

    def write_off_all(self, contribution: Tensor) -> None:
        self._all = contribution
        self.c.sub_(contribution)
        torch.nan_to_num(self.c, 0.0, 0.0, 0.0, out=self.c)

    def give_back_slots(self, unused: Tensor, group: Group) -> None:
        for which, slot in enumerate(group.slots):
            piece = slot.span(self._all)
            slot.span(self.c).add_(torch.where(unused[which], piece, 0.0))
            piece.copy_(torch.where(unused[which], 0.0, piece))

    def settle(self, bad: Tensor) -> None:
        turned = bad if self._verdict is None else bad & ~self._verdict
        super().settle(bad)
        self.c.add_(torch.where(turned, self._all, 0.0))

    def accepted(self) -> Tensor:
        return self._all.clone()


def with_scale(signs: Tensor, step: GroupStep) -> Tensor:
    """Signs have no size, but a GradScaler will divide by its scale."""
    return signs if step.scale is None else signs * step.scale.to(signs.dtype)


def spread(per_slot: Tensor, group: Group, like: Tensor) -> Tensor:
    """One number per slot -> one per element of the group's buffer, 0 between the slots."""
    flat = torch.zeros_like(like)
    for which, slot in enumerate(group.slots):
        slot.span(flat).copy_(per_slot[which].expand(slot.numel))
    return flat


def scaled(signs: Tensor, scales: Tensor, group: Group, like: Tensor) -> Tensor:
    return torch.where(signs, 1.0, -1.0).to(like.dtype) * spread(scales, group, like)
