"""Exchanges of signs: the majority vote, and scaled signs of every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.exchange.requests import AllToAll, Gather, Place, Program
from thinwire.kernels.cuda.signs import BITS, SignPlanes, sign_toolchain


def pack_bits(bits: Tensor) -> Tensor:
    """bool [..., 8 m] -> uint8 [..., m], the first bit lowest."""
    weights = 2 ** torch.arange(BITS, dtype=torch.uint8, device=bits.device)
    grouped = bits.to(torch.uint8).view(*bits.shape[:-1], -1, BITS)
    return (grouped * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """uint8 [..., m] -> bool [..., 8 m]."""
    shifts = torch.arange(BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).bool().flatten(-2)


def vote_by_majority(values: Tensor, place: Place, abstain: bool, phase: str) -> Program[Tensor]:
    """The sign that most ranks have, element by element: float32 -1, 0 or 1, the same on every rank.

    1. Each rank sends the signs of piece p to rank p.
    2. Rank p counts the votes for its piece.
    3. The verdicts are gathered. Both ways together cost what a ring all-reduce of so many bits would.

    With `abstain` a 0 does not vote and a tie gives 0, in 2 bits per element; without, as published, both count as +1
    and 1 bit does.
    """
    count = values.numel()
    share = -(-count // (place.world * BITS)) * BITS
    toolchain = sign_toolchain(values.device, values.dtype, count)
    if place.world > 1 and toolchain is not None:
        planes = SignPlanes(toolchain, abstain)
        (ballots,) = yield (AllToAll(planes.write(values, place.world, share), phase),)
        (gathered,) = yield (Gather(planes.count(ballots), phase),)
        return planes.read(gathered, count)
    padded = torch.zeros(place.world * share, dtype=torch.int8, device=values.device)
    padded[:count] = values.sign().to(torch.int8)
    votes = padded.view(place.world, share)
    if place.world > 1:
        (ballots,) = yield (AllToAll(_write(votes, abstain), phase),)
        tally = _read(ballots, abstain).sum(0, dtype=torch.int32)
        verdict = tally.sign().to(torch.int8)[None]
        (gathered,) = yield (Gather(_write(verdict, abstain).view(-1), phase),)
        votes = _read(gathered, abstain)
    elif not abstain:
        votes = torch.where(votes >= 0, 1, -1)
    return votes.reshape(-1)[:count].float()


def _write(signs: Tensor, abstain: bool) -> Tensor:
    """int8 [rows, 8 m] -> uint8 [rows, bytes]: a plane of "not negative", and one of "not zero" if zeros count."""
    plus = pack_bits(signs >= 0)
    return torch.cat([plus, pack_bits(signs != 0)], 1) if abstain else plus


def _read(written: Tensor, abstain: bool) -> Tensor:
    if not abstain:
        return torch.where(unpack_bits(written), 1, -1).to(torch.int8)
    plus, voted = (unpack_bits(plane) for plane in written.chunk(2, dim=1))
    return torch.where(plus, 1, -1).to(torch.int8) * voted


def gather_words(
    words: Tensor, signs: Tensor, place: Place, phase: str
) -> Program[tuple[Tensor, Tensor]]:
    """(words of all ranks [world, w], signs of all ranks uint8 [world, bytes]) in one all-gather.

    `signs` are a rank's packed bits, `words` its float32 scales and flags.
    """
    payload = torch.cat([words.view(torch.uint8), signs])
    gathered = payload[None]
    if place.world > 1:
        (gathered,) = yield (Gather(payload, phase, control_bytes=words.nbytes),)
    head = words.nbytes
    all_words = gathered[:, :head].reshape(-1).view(torch.float32).view(place.world, -1)
    return all_words, gathered[:, head:].contiguous()
