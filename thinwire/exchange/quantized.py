"""QuantizedSum: everybody's gradient in a few bits, added up in float32 by the owner of each block.

1. Each rank quantises its compensated gradient in blocks and sends the blocks of owner p to rank p. Its own it keeps as they are.
2. Rank p adds what it got in float32, rank 0's first.
3. Rank p quantises the sums once more, and all ranks gather them.

What (1) loses stays in the sender's memory, what (3) loses in the owner's. With hosts of several ranks, the ranks of a host first add
up their gradients in full precision, each the blocks of the owners with its own number on every host; between hosts it then goes on as
above, and inside them the coded sums are gathered.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from thinwire.exchange.base import Outcome
from thinwire.exchange.requests import (
    BETWEEN,
    EVERYONE,
    INSIDE,
    AllToAll,
    Gather,
    Place,
    Program,
)
from thinwire.kernels.inspection import drop_if_bad
from thinwire.layout import Group, OwnedBlocks
from thinwire.memory.account import Account
from thinwire.wire.codec import Flags
from thinwire.wire.quantize import (
    BlockQuantizer,
    Coded,
    Limit,
    MessageLayout,
    draw,
    scramble,
)


class QuantizedSum:
    """The exchange of one group, decided once."""

    def __init__(
        self,
        group: Group,
        place: Place,
        quantizer: BlockQuantizer,
        block: int,
        *,
        stochastic: bool,
        per_host: int = 1,
        sum_quantizer: BlockQuantizer | None = None,
        phase: str = "quantized",
    ) -> None:
        self.group = group
        self.phase = phase
        self.quantizer = quantizer
        self.sum_quantizer = sum_quantizer or quantizer
        """Of what owners send to all."""
        self.cuts_own = self.sum_quantizer.bits > quantizer.bits
        """Whether a limit goes for an owner's own part, too. Where sums have no more bits than what is sent, what is left of them lies
        there as well, as large as what all ranks send together, and one rank's limit would let it out slowly."""
        self.stochastic = stochastic
        self.place = place
        self.per_host = per_host
        self.peers = place.world // per_host
        """Ranks among which codes travel."""
        self.peer = place.rank // per_host
        """This one among them."""
        self.scope = EVERYONE if per_host == 1 else BETWEEN
        self.owned = OwnedBlocks(group, block, place.world)
        self.among = slice(place.rank % per_host, None, per_host)
        """The owners among the peers, as an index: a list would be copied to the device, for which the host waits."""
        self.team = range(place.world)[self.among]
        """Their ranks."""
        self.owner = self.team[self.peer]
        """This rank as an owner."""
        width, slots = self.owned.width, len(group.slots)
        self.offer = MessageLayout.of(quantizer, slots + 1, width, block)
        """What a rank sends to an owner: which slots had a gradient, whether something was not finite, blocks."""
        self.sums = MessageLayout.of(self.sum_quantizer, 1, width, block)
        """What an owner sends to all: whether a sum overflowed, blocks."""
        names = [zlib.crc32(slot.name.encode()) for slot in group.slots]
        self._seeds = torch.tensor(names, dtype=torch.int64).to(torch.int32).to(group.device)
        self._steps = torch.zeros_like(self._seeds)
        """How often each slot has been exchanged. Counted on the device: to tell it would make the host wait."""
        self._expected: Sequence[int] = ()

    @cached_property
    def lengths(self) -> Tensor:
        """int32 [peers, width]: elements of each of the team's blocks."""
        return self.owned.lengths[self.among]

    @cached_property
    def _slots(self) -> Tensor:
        """int64 [peers, width]: their slots."""
        return self.owned.slots[self.among].long()

    @cached_property
    def _places(self) -> Tensor:
        """int32 [peers, width]: elements of the slots that come before them."""
        return self.owned.places[self.among]

    @cached_property
    def _real(self) -> Tensor:
        """bool [width, size]: which places of this rank's own blocks are elements. Signs have no zero for the others."""
        inside = torch.arange(self.owned.size, dtype=torch.int32, device=self.group.device)
        return inside < self.lengths[self.peer][:, None]

    # -- the program -------------------------------------------------------------------------------------------

    def run(
        self,
        account: Account,
        flags: Flags,
        counts: Sequence[int],
        divisor: Tensor | None = None,
        limit: Limit = None,
    ) -> Program[Outcome]:
        """Sum `account.c` over ranks; what is not sent of it stays there. `counts` are the slots' exchanges so far.

        With a `divisor` (positive, the same on all ranks, in the group's layout) c / divisor is quantised. With a `limit`, in
        these units, what a rank sends of an element is cut to it, what a host of several sends to as many times the limit, and
        what an owner adds up to as many times as there are ranks; the rest stays as well. Of an owner's own part see `cuts_own`.
        """
        c = account.c
        most = None if limit is None else limit * self.per_host
        self._count(counts)
        blocks = self.owned.cut(c)
        divisors = None if divisor is None else self.owned.cut(divisor)
        if divisors is not None:
            divisors = torch.where(divisors > 0, divisors, 1.0)
        by_team = None if divisors is None else divisors[self.among]
        if self.per_host > 1:
            before = c.clone()
            blocks, flags = yield from self._sum_inside(blocks, flags)
            c.zero_()
        sent = SentBlocks(self, blocks, self._encode(blocks, by_team, most), by_team)
        account.write_off_all(sent if self.per_host == 1 else SentInside(before, account))
        left = blocks - sent.decoded()
        left[self.peer] = blocks[self.peer]
        self.owned.write(left, c, self.team)
        words = torch.cat([flags.had_gradient, flags.non_finite[None]])
        arrived = yield from self.deal_out(self.offer.write(words, sent.coded))
        raised, coded = self.offer.read(arrived)
        used, bad = raised[:-1], raised[-1]
        own_divisor = None if by_team is None else by_team[self.peer]
        own, refused = self._own_part(blocks[self.peer], own_divisor, most)
        total = self._add_up(coded, own)
        overflow = ~total.isfinite().all()
        drop_if_bad(total, overflow)
        known = used[self._slots]
        total = torch.where(known[self.peer][:, None] & self._real, total, 0.0)
        # So that the mean is within the limit.
        final = self._encode_sums(total, None if limit is None else limit * self.place.world)
        kept = total - self.sum_quantizer.decode(final)
        if own_divisor is not None:
            kept = kept * own_divisor
        if refused is not None:
            kept += refused
        sent.settle_used(c, known, kept)
        message = self.sums.write(overflow[None], Coded(*(part[None] for part in final)))
        gathered = yield from self.gather(message.view(-1))
        overflowed, coded = self.sums.read(gathered)
        mean = self.sum_quantizer.decode(coded, divisors).mul_(1 / self.place.world)
        update = torch.zeros_like(c)
        self.owned.write(mean, update)
        return Outcome(update, bad | overflowed[0])

    def _own_part(
        self, blocks: Tensor, divisor: Tensor | None, most: Limit
    ) -> tuple[Tensor, Tensor | None]:
        """(this rank's own blocks as it adds them up, what of them stays here because the limit cuts it)."""
        if divisor is None:
            return blocks, None
        own = blocks / divisor
        if not self.cuts_own:
            return own, None
        own = own if most is None else own.clamp(-most, most)
        return own, blocks - own * divisor

    def _sum_inside(self, blocks: Tensor, flags: Flags) -> Program[tuple[Tensor, Flags]]:
        """(the host's sum of the blocks that this rank's team owns, the host's flags)."""
        local, width, size = self.per_host, self.owned.width, self.owned.size
        rows = blocks.view(self.peers, local, width, size).transpose(0, 1).reshape(local, -1)
        words = torch.cat([flags.had_gradient, flags.non_finite[None]]).to(rows.dtype)
        rows = torch.cat([rows, words.expand(local, -1)], 1)
        control = words.nbytes * local
        request = AllToAll(rows, f"{self.phase}/inside", control_bytes=control, scope=INSIDE)
        (arrived,) = yield (request,)
        total = arrived[0].clone()
        for row in arrived[1:]:
            total += row
        raised = total[-words.numel() :] > 0
        summed = total[: -words.numel()].view(self.peers, width, size)
        overflow = ~summed.isfinite().all()
        drop_if_bad(summed, overflow)
        return summed, Flags(non_finite=raised[-1] | overflow, had_gradient=raised[:-1])

    def deal_out(self, message: Tensor) -> Program[Tensor]:
        """uint8 [peers, bytes]: what the peers have for this owner, given what this rank has for each."""
        if self.peers == 1:
            return message
        padding = (
            message.nbytes - self._useful_bytes(self.quantizer) - self.peers * self.offer.flags
        )
        (arrived,) = yield (
            AllToAll(
                message,
                self.phase,
                control_bytes=self.peers * self.offer.flags,
                padding_bytes=max(0, padding),
                scope=self.scope,
            ),
        )
        return arrived

    def gather(self, message: Tensor) -> Program[Tensor]:
        """uint8 [world, bytes]: all owners' sums."""
        gathered = message[None]
        if self.peers > 1:
            useful = self._useful_bytes(self.sum_quantizer) // self.peers
            padding = message.nbytes - useful - self.sums.flags
            request = Gather(
                message,
                self.phase,
                control_bytes=self.sums.flags,
                padding_bytes=max(0, padding),
                scope=self.scope,
                apart=True,
            )
            (gathered,) = yield (request,)
        if self.per_host == 1:
            return gathered
        request = Gather(gathered.reshape(-1), f"{self.phase}/inside", scope=INSIDE, apart=True)
        (inside,) = yield (request,)
        by_local = inside.reshape(self.per_host, self.peers, -1)
        return by_local.transpose(0, 1).reshape(self.place.world, -1)

    def _useful_bytes(self, quantizer: BlockQuantizer) -> int:
        """Of the codes and scales of all the team's blocks."""
        numel = sum(slot.numel for slot in self.group.slots) // self.per_host
        scales = self.owned.blocks // self.per_host * quantizer.scale_bytes
        return numel * quantizer.bits // 8 + scales

    # -- its parts ---------------------------------------------------------------------------------------------

    def _count(self, counts: Sequence[int]) -> None:
        """A step begins."""
        if not self.stochastic:
            return
        if self._expected == counts:
            self._steps += 1
        else:
            self._steps.copy_(torch.tensor(counts, dtype=torch.int32))
        self._expected = [count + 1 for count in counts]

    def _encode(self, blocks: Tensor, divisor: Tensor | None, limit: Limit) -> Coded:
        draws = self._draw(self.place.rank, self._slots, self._places)
        return self.quantizer.encode(blocks, self.lengths, draws, divisor, limit)

    def _encode_sums(self, total: Tensor, limit: Limit) -> Coded:
        peer = self.peer
        draws = self._draw(self.place.world, self._slots[peer], self._places[peer])
        return self.sum_quantizer.encode(total, self.lengths[peer], draws, limit=limit)

    def _draw(self, stream: int, slots: Tensor, places: Tensor) -> Tensor | None:
        """A hash of slot, place, step and who draws: a sender by its rank, all owners alike."""
        if not self.stochastic:
            return None
        seeds = scramble(self._seeds + self._steps * -1640531527 + stream * 40503)
        return draw(seeds[slots], places, self.owned.size)

    def _add_up(self, coded: Coded, own: Tensor) -> Tensor:
        """In rank order, this rank's own blocks as they are given."""
        rows = list(self.quantizer.decode(coded).unbind(0))
        rows[self.peer] = own
        total = rows[0].to(own.dtype, copy=True)
        for row in rows[1:]:
            total += row
        return total


class SentBlocks:
    """What one rank has sent in one step, as its codes, and its own blocks as they were."""

    def __init__(
        self, sum_: QuantizedSum, blocks: Tensor, coded: Coded, divisor: Tensor | None
    ) -> None:
        self.coded = coded
        self._sum = sum_
        self._divisor = divisor
        self._own = blocks[sum_.peer].clone()
        self._accepted = torch.zeros_like(self._own)
        """Of its own blocks."""
        self._used: Tensor | None = None
        """bool [peers, width]: of slots that some rank had a gradient for; None before that is known."""

    def decoded(self) -> Tensor:
        """[peers, width, size]"""
        return self._sum.quantizer.decode(self.coded, self._divisor)

    def settle_used(self, c: Tensor, used: Tensor, kept: Tensor) -> None:
        """The sums are there: keep what is left of this rank's own, and take back what no rank had a gradient for."""
        sum_, self._used = self._sum, used
        kept = torch.where(used[sum_.peer][:, None], kept.to(self._own.dtype), self._own)
        self._accepted = self._own - kept
        sum_.owned.write(kept[None], c, [sum_.owner])
        if used.device.type != "cpu" or not bool(used.all()):
            self._return(c, ~used)

    def _return(self, c: Tensor, flags: Tensor) -> None:
        """Add what was sent to others to `c`, for the blocks whose flags (bool [peers, width]) are up."""
        sum_ = self._sum
        back = torch.where(flags[..., None], self.decoded(), 0.0)
        back[sum_.peer] = 0.0
        sum_.owned.write(sum_.owned.cut(c, sum_.team) + back, c, sum_.team)

    def return_to(self, c: Tensor, flag: Tensor) -> None:
        sum_ = self._sum
        known = flag if self._used is None else self._used & flag
        self._return(c, known.expand(sum_.peers, sum_.owned.width))
        now = sum_.owned.cut(c, [sum_.owner])
        sum_.owned.write(torch.where(flag, self._own, now), c, [sum_.owner])

    def add_to(self, total: Tensor) -> None:
        sum_ = self._sum
        sent = self.decoded().to(total.dtype)
        if self._used is not None:
            sent = torch.where(self._used[..., None], sent, 0.0)
        sent[sum_.peer] = self._accepted
        flat = torch.zeros_like(total)
        sum_.owned.write(sent, flat, sum_.team)
        total += flat


class SentInside:
    """With hosts of several ranks memory moves: what a rank has given is what it had before less what it has now."""

    def __init__(self, before: Tensor, account: Account) -> None:
        self._before = before
        self._account = account

    def return_to(self, c: Tensor, flag: Tensor) -> None:
        c.copy_(torch.where(flag, self._before, c))

    def add_to(self, total: Tensor) -> None:
        total += self._before - self._account.c
