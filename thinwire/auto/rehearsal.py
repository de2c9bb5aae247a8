"""Rehearsal: the engine run on one bucket with nobody to talk to, to learn what an exchange asks for and what it costs.

On the meta device only shapes pass through, whatever their size: that tells the collectives of an exchange among any number of
workers. On a real device the same run tells what encoding and decoding take.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.engine.drivers import Driver
from thinwire.engine.reducer import Reducer
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import (
    AllToAllUneven,
    Collective,
    Common,
    Gather,
    Place,
    Program,
    Request,
    Swap,
)
from thinwire.layout import Bucket, ParameterInfo, lay_out
from thinwire.memory.adam import SECOND_MOMENT
from thinwire.methods.base import Method
from thinwire.observe.clock import wait_for
from thinwire.observe.ledger import Ledger
from thinwire.plan.prices import Rounds, Travel

META = torch.device("meta")
MANY = 8
"""Workers beyond which reading every payload takes a while even without data."""


@dataclass(frozen=True)
class Rehearsed:
    """What one bucket asked for and took."""

    rounds: Rounds
    encode_s: float
    """Before the first request."""
    decode_s: float
    """Between requests and after the last one."""


class Understudy(Driver):
    """Answers every request at once, with as many bytes as the other ranks would have sent."""

    def __init__(self, place: Place, device: torch.device, rows: int) -> None:
        """`rows` is how many ranks' payloads are answered with, where they are read one by one."""
        self.place = place
        self.rows = rows
        self.ledger = Ledger(place.world)
        self.device = device
        self.rounds: list[tuple[Travel, ...]] = []
        self.decode_s = 0.0
        self.asked_at = 0.0

    def place_of(self, scope: str) -> Place:
        return self.place

    def add_hosts(self, per_host: int) -> None:
        """Inside or between hosts, an understudy is alone all the same."""

    def start(
        self, program: Program[Any], future: Future[Any] | None = None, what: str = ""
    ) -> Future[Any]:
        future = self.new_future() if future is None else future
        try:
            batch = next(program)
            wait_for(self.device)
            self.asked_at = time.perf_counter()
            while True:
                asked = [one for one in batch if isinstance(one, Collective)]
                world = self.place.world
                travels = tuple(Travel(one.kind, one.sent_bytes(world)) for one in asked)
                self.rounds += [travels] if travels else []
                replies = [self.answer(request) for request in batch]
                wait_for(self.device)
                resumed = time.perf_counter()
                try:
                    batch = program.send(replies)
                finally:
                    wait_for(self.device)
                    self.decode_s += time.perf_counter() - resumed
        except StopIteration as finished:
            future.set_result(finished.value)
        return future

    def answer(self, request: Request) -> Any:
        if isinstance(request, Common):
            return request.make()
        assert isinstance(request, Collective)
        tensor, world = request.tensor, self.place.world
        if isinstance(request, Gather):
            rows = self.rows if request.apart else world
            return tensor.reshape(1, -1).expand(rows, tensor.numel()).contiguous()
        if isinstance(request, AllToAllUneven):
            return tensor.new_zeros((sum(request.receive), *tensor.shape[1:]))
        if isinstance(request, Swap):
            return tensor.clone() if request.source is not None else tensor.new_empty(0)
        return tensor.clone()


def trace(infos: Sequence[ParameterInfo], method: Method, world: int) -> Rounds:
    """The collectives of one bucket of these parameters among `world` workers, from shapes alone.

    Among many, one payload stands for all where they are read one by one, which tells as much; exchanges that need all of
    them fail on that, and get them.
    """
    if world > MANY:
        with contextlib.suppress(RuntimeError, ValueError, IndexError):
            return rehearse(infos, method, world, rows=1).rounds
    return rehearse(infos, method, world).rounds


def rehearse(
    infos: Sequence[ParameterInfo],
    method: Method,
    world: int,
    *,
    device: torch.device = META,
    times: int = 1,
    rows: int | None = None,
) -> Rehearsed:
    """One bucket of these parameters among `world` workers, `times` times; the costs are those of the fastest time."""
    dtype = infos[0].dtype
    parameters = {info.name: info for info in infos}
    layout = lay_out(infos, dtype, device)
    driver = Understudy(Place(0, world), device, world if rows is None else rows)
    reducer = Reducer(parameters, method.rehearsal, driver, device=device)
    for info in infos:
        # Whoever divides by a second moment has one.
        ones = torch.ones(info.shape, device=device)
        reducer.assignments.write_memory(info.name, SECOND_MOMENT, ones)
    generator = torch.Generator("cpu" if device == META else device).manual_seed(0)
    encode, decode = [], []
    for _ in range(times):
        flat = _gradient(layout.numel, dtype, device, generator)
        driver.rounds, driver.decode_s = [], 0.0
        wait_for(device)
        began = driver.asked_at = time.perf_counter()
        future = reducer.reduce(Bucket(layout, flat))
        reducer.end_backward()
        if not future.done():
            raise ExchangeError(f"{type(method).__name__} asked for nothing and did not end")
        future.value()
        encode.append(driver.asked_at - began)
        decode.append(driver.decode_s)
    return Rehearsed(tuple(driver.rounds), min(encode), min(decode))


def _gradient(
    numel: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    if device == META:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.randn(numel, device=device, generator=generator).to(dtype)


class Traffic:
    """The requests of every method on every bucket, rehearsed on shapes once for all buckets of the same shapes."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._known: dict[tuple[Any, ...], Rounds] = {}

    def rounds(self, infos: Sequence[ParameterInfo], method: Method) -> Rounds:
        shapes = tuple((info.shape, info.strides, info.dtype, info.kind) for info in infos)
        key = (method, shapes)
        if key not in self._known:
            self._known[key] = trace(infos, method, self.world)
        return self._known[key]
