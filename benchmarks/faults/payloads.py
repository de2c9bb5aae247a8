"""Damaged payloads and replicas: one bit flips at a sender, at a receiver, or in a parameter; nobody may go on with other bits.

Payloads travel under `checksum=True`: all ranks refuse the step, and the run ends with the bits of one without the refused steps. The
words of the checksums themselves are damaged too: fingerprints, and the words by which ranks agree.
Replicas are watched (`watch=1, on_difference="repair"`): the rank that differs is named and gets the others' bits back.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from faults.batches import SPARSE, batch, fingerprint, make_model
from faults.groups import run_group
from faults.parts import Tally
from thinwire import errors
from thinwire.engine import checksums
from thinwire.exchange.requests import Collective

WORLD = 3
CHUNK = 200
"""Flips of one group of processes."""
METHODS = {
    "Dense": tw.Dense(),
    "ADTopK": tw.ADTopK(**SPARSE),
    "TopK": tw.TopK(values="bf16", indices="packed", **SPARSE),
    "OkTopK": tw.OkTopK(**SPARSE),
    "GTopK": tw.GTopK(**SPARSE),
    "TopKDSA": tw.TopKDSA(**SPARSE),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
    "PowerSGD": tw.PowerSGD(rank=2, dense_fallback=False),
}


def is_payload(request: Any) -> bool:
    return isinstance(request, Collective) and not is_checksum(request)


def is_checksum(request: Any) -> bool:
    return isinstance(request, Collective) and request.phase == checksums.PHASE


TARGETS = {"payloads": is_payload, "checksums": is_checksum}


class Flipper:
    """A network that flips one bit when it is told to, in what this rank sends or in what it receives of the messages it may hit."""

    def __init__(self, network: Any, may_hit: Callable[[Any], bool]) -> None:
        self.calls = 0
        self._may_hit = may_hit
        self.plan: tuple[int, bool, float, int] | None = None
        """The call, whether at the sender, the place from 0 to 1, the bit."""
        self.flipped = False
        self._perform = network.perform
        network.perform = self.perform

    def perform(self, requests: Any, what: str = "") -> list[Any]:
        travels = any(map(self._may_hit, requests))
        self.calls += travels
        if not travels or self.plan is None or self.plan[0] != self.calls:
            return self._perform(requests, what)
        _, sending, _, _ = self.plan
        if sending:
            return self._perform(tuple(map(self._damaged, requests)), what)
        replies = self._perform(requests, what)
        for one, reply in zip(requests, replies, strict=True):
            if self._may_hit(one):
                self._flip(reply)
        return replies

    def _damaged(self, request: Any) -> Any:
        if not self._may_hit(request):
            return request
        tensor = request.tensor.clone()
        self._flip(tensor)
        return replace(request, tensor=tensor)

    def _flip(self, tensor: Tensor) -> None:
        """Only once, in the first message that has anything in it."""
        if self.plan is not None and tensor.numel():
            _, _, where, bit = self.plan
            raw = tensor.view(-1).view(torch.uint8)
            raw[int(where * raw.numel())] ^= 1 << bit
            self.plan, self.flipped = None, True


# -- payloads ----------------------------------------------------------------------------------------------------


def run_payloads(first: int, last: int, folder: Path) -> Iterator[Tally]:
    yield from damage("payloads", first, last)


def run_checksums(first: int, last: int, folder: Path) -> Iterator[Tally]:
    yield from damage("checksums", first, last)


def damage(target: str, first: int, last: int) -> Iterator[Tally]:
    for begin in range(first, last, CHUNK):
        count = min(CHUNK, last - begin)
        name = list(METHODS)[begin // CHUNK % len(METHODS)]
        results = run_group(WORLD, damage_and_repeat, target, name, begin, count)
        said = [one[0] for one in results]
        same = len({one[1] for one in results} | {one[2] for one in results}) == 1
        flips = sum(one[3] for one in results)
        refused = sum(map(bool, said[0]))
        yield {
            "units": count,
            "flips": flips,
            "refused by all ranks": refused,
            "without effect": flips - refused,
            "raised on some ranks only": float(len(set(said)) > 1),
            "silent differences": float(not same),
        }


def damage_and_repeat(
    rank: int, world: int, target: str, name: str, seed: int, count: int
) -> tuple[tuple[str, ...], str, str, int]:
    """What was said, the bits at the end, those of the same run without damage or refused steps, and how many bits flipped."""
    said, end, flips = train_damaged(rank, world, name, seed, [""] * count, target)
    _, wanted, _ = train_damaged(rank, world, name, seed, said, None)
    return tuple(said), end, wanted, flips


def train_damaged(
    rank: int, world: int, name: str, seed: int, refused: list[str], target: str | None
) -> tuple[list[str], str, int]:
    """Flip a bit in every step but the first, which shows how many calls a step has; none without a target."""
    draw = random.Random(seed)
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = tw.attach(ddp, METHODS[name], optimizer=optimizer, checksum=True, skippable=True)
    flipper = Flipper(handle.reducer.driver.network, TARGETS[target or "payloads"])
    said, calls, flips = [], 0, 0
    for step in range(len(refused) + 1):
        flipper.calls, flipper.flipped = 0, False
        if target is not None and step:
            plan = (
                1 + draw.randrange(calls),
                draw.random() < 0.5,
                draw.random(),
                draw.randrange(8),
            )
            flipper.plan = plan if draw.randrange(world) == rank else None
        optimizer.zero_grad()
        x = batch(seed, step, rank)
        words = ""
        try:
            (ddp(x) - x.flip(1)).square().mean().backward()
        except errors.DamageError as error:
            words = str(error)
        flips += flipper.flipped
        flipper.plan = None
        calls = max(calls, flipper.calls)
        if step:
            said.append(words)
        if not words:
            if step and refused[step - 1]:
                handle.discard_step()
            else:
                optimizer.step()
    handle.close()
    return said, fingerprint(model), flips


# -- replicas ----------------------------------------------------------------------------------------------------


def run_replicas(first: int, last: int, folder: Path) -> Iterator[Tally]:
    for begin in range(first, last, CHUNK):
        count = min(CHUNK, last - begin)
        name = list(METHODS)[begin // CHUNK % len(METHODS)]
        results = run_group(WORLD, drift, name, begin, count)
        differ = [len(set(ends)) > 1 for ends in zip(*results, strict=True)]
        yield {"units": count, "repaired": count - sum(differ), "silent differences": sum(differ)}


def drift(rank: int, world: int, name: str, seed: int, count: int) -> list[str]:
    """Flip a bit of a parameter of one rank, train two steps, and look at the parameters; `count` times."""
    logging.disable(logging.WARNING)
    draw = random.Random(seed)
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = {"watch": 1, "on_difference": "repair"}
    handle = tw.attach(ddp, METHODS[name], optimizer=optimizer, **options)
    ends = []
    for number in range(count):
        victim, where, bit = draw.randrange(world), draw.random(), draw.randrange(8)
        with torch.no_grad():
            parameter = draw.choice(list(model.parameters()))
            raw = parameter.view(-1).view(torch.uint8)
            if rank == victim:
                raw[int(where * raw.numel())] ^= 1 << bit
        for step in range(2):
            optimizer.zero_grad()
            x = batch(seed, 2 * number + step, rank)
            (ddp(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
        handle.check_replicas()
        ends.append(fingerprint(model))
    handle.close()
    return ends
