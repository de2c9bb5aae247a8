"""Do payloads arrive as they were encoded? Many steps with side streams, every payload checked on the device.

    thinwire lab --hosts 4 --rate 10gbit --share-gpu --mps -- python -m tests.gpu.race --steps 1000 --limit 80 --out verdicts.json
    torchrun --nproc-per-node 3 -m tests.gpu.race --steps 20 --device cpu

In this debug mode every payload has a stamp: step, bucket, round, and a checksum that is taken on the stream that
encodes, right after encoding. The stamp travels beside the payload, which stays the tensor it is without it, and is
compared with what arrived on the stream that decodes. A payload that was overwritten before it had left, read before
it had arrived, or belongs to another step does not match its stamp. Mismatches are counted on the device and read at
the end. Sums cannot be checked that way; that all ranks end with the same bits is checked for them too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import thinwire as tw
from tests.gpu.seats import Check, Seat, make_method, run_script
from thinwire.engine import Driver
from thinwire.engine.device_drivers import DRIVERS
from thinwire.exchange.requests import (
    EVERYONE,
    AllToAll,
    Batch,
    Gather,
    Place,
    Program,
    Request,
    Swap,
)

METHODS = ("adtopk", "topk", "dgc", "oktopk", "exclusive", "gtopk-conserve")
"""Between them every collective whose payload arrives as it was sent."""
FIRST_STEPS = 1000
OTHER_STEPS = 100
"""The first method runs long, the others with their other collectives a tenth of that."""
PLACE_WORDS = 3
"""Of a stamp: step, bucket, round."""
WIDTH = 512
BUCKET_MB = 0.5
MERGE_BYTES = 4 << 20
"""Buckets of a megabyte are encoded two at a time, where they lie, and the last one by itself."""


class Inspector:
    """Stamps what is sent and counts what arrives otherwise."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.step = 0
        self.checked = 0
        """Payloads compared so far on this rank."""
        self._programs = 0
        self._counters: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}

    def mismatches(self) -> int:
        self.seat.wait()
        return sum(int(counter) for counter in self._counters.values())

    def watched(self, program: Program[Any]) -> Program[Any]:
        """The same program; beside its requests travel the stamps."""
        # Programs begin in the same order on all ranks; what follows may mix between threads.
        self._programs += 1
        place, rounds = (self.step, self._programs), itertools.count()
        try:
            batch = next(program)
            while True:
                turn = next(rounds)
                stamps = [self._stamp(r, (*place, turn)) for r in batch if is_checked(r)]
                replies = yield (*batch, *stamps)
                self._compare(batch, replies[: len(batch)], replies[len(batch) :])
                batch = program.send(replies[: len(batch)])
        except StopIteration as finished:
            return finished.value

    def _stamp(self, request: Request, place: Sequence[int]) -> Gather:
        words = [torch.full((1,), number, device=request.tensor.device) for number in place]
        return Gather(torch.cat([*words, self.checksums(rows_of(request))]), "stamp")

    def _compare(self, batch: Batch, replies: list[Tensor], stamps: list[Tensor]) -> None:
        checked = [pair for pair in zip(batch, replies, strict=True) if is_checked(pair[0])]
        for (request, reply), stamp in zip(checked, stamps, strict=True):
            place = stamp[:, :PLACE_WORDS]
            wrong = (place != place[self.seat.rank]).any(1)
            arrived, expected, sources = self._arrived(request, reply, stamp)
            bad = (self.checksums(arrived) != expected).sum() + wrong.sum()
            self._counter().add_(bad)
            self.checked += len(sources)

    def _arrived(
        self, request: Request, reply: Tensor, stamp: Tensor
    ) -> tuple[Tensor, Tensor, range]:
        """(rows that arrived, their checksums as sent, the ranks they came from)."""
        sums, world = stamp[:, PLACE_WORDS:], self.seat.world
        if isinstance(request, AllToAll):
            return reply.reshape(world, -1), sums[:, self.seat.rank], range(world)
        if isinstance(request, Swap):
            if request.source is None:
                return reply.new_empty(0, 1), sums.new_empty(0), range(0)
            ranks = range(request.source, request.source + 1)
            return reply.reshape(1, -1), sums[request.source], ranks
        return reply, sums[:, 0], range(world)

    def checksums(self, rows: Tensor) -> Tensor:
        """int64 [rows]: the bytes of every row, weighted by their places; whole numbers, so in any order alike."""
        raw = rows.contiguous().view(torch.uint8)
        return (raw.long() * self._weights_of(raw)).sum(1)

    def _weights_of(self, raw: Tensor) -> Tensor:
        length = raw.shape[1]
        if length not in self._weights:
            places = torch.arange(1, length + 1, dtype=torch.int64)
            self._weights[length] = (places * 2654435761 % 1000003 + 1).to(raw.device)
            self.seat.wait()  # another stream may read it next
        return self._weights[length]

    def _counter(self) -> Tensor:
        """One per stream: two streams that add to the same number would be a race of their own."""
        cuda = self.seat.device.type == "cuda"
        key = torch.cuda.current_stream().cuda_stream if cuda else 0
        if key not in self._counters:
            self._counters[key] = torch.zeros((), dtype=torch.int64, device=self.seat.device)
        return self._counters[key]


def is_checked(request: Request) -> bool:
    """Requests whose tensors arrive as they are."""
    return isinstance(request, Gather | AllToAll | Swap) and request.scope == EVERYONE


def rows_of(request: Request) -> Tensor:
    """What is summed up by itself: a row per destination, or the whole."""
    if isinstance(request, AllToAll):
        return request.tensor.reshape(request.tensor.shape[0], -1)
    return request.tensor.reshape(1, -1)


class WatchedDriver(Driver):
    """Another driver, whose programs go through an inspector. It has buckets joined on every device."""

    merge_bytes = MERGE_BYTES

    def __init__(self, driver: Driver, inspector: Inspector) -> None:
        self.driver = driver
        self.place = driver.place
        self.ledger = driver.ledger
        self.network = driver.network
        self.inspector = inspector

    def place_of(self, scope: str) -> Place:
        return self.driver.place_of(scope)

    def agree(self, settings: dict[str, str]) -> None:
        self.driver.agree(settings)

    def gather(self, content: bytes) -> list[bytes]:
        return self.driver.gather(content)

    def broadcast(self, content: bytes, source: int) -> bytes:
        return self.driver.broadcast(content, source)

    def add_hosts(self, per_host: int) -> None:
        self.driver.add_hosts(per_host)

    def new_future(self) -> Future[Tensor]:
        return self.driver.new_future()

    def hand_over(self, job: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        self.driver.hand_over(job, on_error)

    def catch_up(self) -> None:
        self.driver.catch_up()

    def start(
        self, program: Program[Tensor], future: Future[Tensor] | None = None, what: str = ""
    ) -> Future[Tensor]:
        return self.driver.start(self.inspector.watched(program), future, what)

    def close(self) -> None:
        self.driver.close()


@contextmanager
def watched_drivers(device_type: str, inspector: Inspector) -> Iterator[None]:
    """Handles made inside have their programs watched."""
    usual = DRIVERS[device_type]
    DRIVERS[device_type] = lambda *args: WatchedDriver(usual(*args), inspector)
    try:
        yield
    finally:
        DRIVERS[device_type] = usual


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def check_race(seat: Seat, name: str, steps: Callable[[str], int]) -> str:
    """No payload differs from its stamp, and all ranks hold the same bits at the end."""
    ddp = DistributedDataParallel(make_layers().to(seat.device), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    inspector = Inspector(seat)
    with watched_drivers(seat.device.type, inspector):
        handle = tw.attach(ddp, make_method(name), optimizer=optimizer)
    generator = torch.Generator(seat.device).manual_seed(seat.rank)
    count = steps(name)
    for step in range(count):
        inspector.step = step
        inputs = torch.randn(16, WIDTH, device=seat.device, generator=generator)
        optimizer.zero_grad(set_to_none=True)
        ddp(inputs).square().mean().backward()
        optimizer.step()
        disturb(seat, step)
    mismatches = inspector.mismatches()
    assert inspector.checked, "nothing was checked"
    layouts = list(handle.reducer.plans)
    assert any(len(layout.buffers) > 1 for layout in layouts), "no buckets were joined"
    assert not mismatches, f"{mismatches} of {inspector.checked} payloads do not match their stamps"
    flat = parameters_to_vector(ddp.parameters()).detach().view(torch.int32).long()
    prints = seat.gather(int((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum()))
    assert len(set(prints)) == 1, "replicas differ"
    handle.close()
    return f"{count} steps, {inspector.checked} payloads, 0 mismatches"


def disturb(seat: Seat, step: int) -> None:
    """Write over memory that was freed: a payload that is still needed there would not survive."""
    if seat.device.type == "cuda":
        for size in (1 << 12, 1 << 15, 1 << 18):
            torch.full((size + 64 * (step % 16),), 0xAB, dtype=torch.uint8, device=seat.device)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--steps", type=int, default=FIRST_STEPS)
    options, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    # In the first step DDP has one bucket.
    others = max(2, options.steps * OTHER_STEPS // FIRST_STEPS)

    def steps(name: str) -> int:
        return options.steps if name == METHODS[0] else others

    checks: dict[str, Check] = {"race": partial(check_race, steps=steps)}
    run_script("Payloads arrive as they were encoded.", checks, METHODS)


if __name__ == "__main__":
    main()
