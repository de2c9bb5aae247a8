"""Measuring what a profile needs beside the steps themselves: the prices of collectives, and the work of candidates."""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.auto.clock import EnergyMeter, MeasuredSteps, Parts
from thinwire.auto.council import Council
from thinwire.auto.rehearsal import rehearse
from thinwire.engine.network import Network
from thinwire.exchange.requests import AllToAll, Collective, Gather, Sum
from thinwire.layout import ParameterInfo, SlotKind
from thinwire.observe.clock import wait_for
from thinwire.plan.candidates import Candidate, EnergyCurve
from thinwire.plan.prices import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    Line,
    MeasuredPrices,
    fit_line,
)
from thinwire.plan.profile import Profile, Unit, WorkCost

TEST_BYTES = (64 << 10, 1 << 20, 8 << 20)
"""What a rank sends, in three tests of each collective."""
TEST_TIMES = 2
SLOW_S = 0.3
"""A link on which the last test took longer is not tested with more bytes."""
WORK_NUMELS = {"cpu": (1 << 14, 1 << 18), "cuda": (1 << 18, 1 << 22)}
"""Elements of the buckets on which encoding and decoding are timed, by the kind of device."""
WORK_TIMES = {"cpu": 2, "cuda": 6}
"""How often, by the kind of device. On CUDA the first time compiles the kernels of an exchange, the second those of the verdict."""
NOISE = 1.1
"""Decoding what twice as many workers sent counts as longer from this ratio on."""
LARGE_SHARE = 0.1
"""Of the last bucket: it leaves last, and nothing hides it, so that its larger parameters are decided about one by one."""
UNIFORM_CURVE = EnergyCurve(((1.0, 1.0),))
"""Where nothing is known: every entry has the same share."""


def link_request(kind: str, nbytes: int, world: int, device: torch.device) -> Collective:
    """A collective by which this rank sends about so many bytes."""
    others = max(1, world - 1)
    if kind == ALL_REDUCE:
        return Sum(torch.zeros(max(1, nbytes * world // (8 * others)), device=device))
    if kind == ALL_GATHER:
        return Gather(torch.zeros(max(1, nbytes // others), dtype=torch.uint8, device=device))
    each = max(1, nbytes // others)
    return AllToAll(torch.zeros(world, each, dtype=torch.uint8, device=device))


def measure_prices(network: Network, council: Council, device: torch.device) -> MeasuredPrices:
    """A line per collective, of the slowest rank. Nothing else may use the network meanwhile."""
    lines = {}
    world = network.place.world
    for kind in (ALL_REDUCE, ALL_GATHER, ALL_TO_ALL):
        points: list[tuple[float, float]] = []
        for nbytes in TEST_BYTES:
            request = link_request(kind, nbytes, world, device)
            # The first of its kind opens connections.
            times = [_time(network, request, device) for _ in range(TEST_TIMES + (not points))]
            (slowest,) = council.largest([min(times)])
            points.append((float(request.sent_bytes(world)), slowest))
            if slowest > SLOW_S:
                break
        lines[kind] = (
            fit_line(points) if len(points) > 1 else Line(0.0, points[0][1] / points[0][0])
        )
    return MeasuredPrices(lines)


def _time(network: Network, request: Collective, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    network.perform((request,), "a test of the link")
    wait_for(device)
    return time.perf_counter() - began


def measure_work(
    candidates: Sequence[Candidate],
    council: Council,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, WorkCost]:
    """What encoding and decoding take, the largest of all ranks.

    Ranks on one GPU take turns: alone on it they measure what the host and the device do by themselves. On CPUs all measure at once,
    as they work at once, and the times have in them what that costs.
    """
    small, large = WORK_NUMELS.get(device.type, WORK_NUMELS["cpu"])
    times_each = WORK_TIMES.get(device.type, WORK_TIMES["cpu"])
    world = council.place.world
    buckets = ((small, world), (large, world), (large, 2 * world))
    sharing = find_sharing(council, device)
    times: list[float] = []
    for turn in range(sharing.workers):
        if turn == sharing.turn:
            for candidate, (numel, among) in itertools.product(candidates, buckets):
                infos = [_square(numel, dtype)]
                done = rehearse(infos, candidate.method, among, device=device, times=times_each)
                times += [done.encode_s, done.decode_s]
        council.wait()
    slowest = iter(council.largest(times))
    found = {}
    for candidate in candidates:
        encode_small, decode_small, encode, decode, _, more = itertools.islice(slowest, 6)
        found[candidate.label] = WorkCost(
            fit_line([(small, encode_small), (large, encode)]),
            fit_line([(small, decode_small), (large, decode)]),
            max(0.0, more - NOISE * decode) / (world * large),
        )
    return found


def _square(numel: int, dtype: torch.dtype) -> ParameterInfo:
    side = math.isqrt(numel)
    return ParameterInfo("rehearsal", (side, side), (side, 1), dtype, SlotKind.LINEAR)


@dataclass(frozen=True)
class Sharing:
    """How a GPU is shared."""

    workers: int = 1
    """At most, over all GPUs; 1 on CPUs, whose cores the measured times tell of."""
    turn: int = 0
    """How many of the workers on this one's GPU come before it."""


def find_sharing(council: Council, device: torch.device) -> Sharing:
    if device.type != "cuda":
        return Sharing()
    mark = float(zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode()))
    return share_out(council, mark)


def share_out(council: Council, mark: float) -> Sharing:
    """Ranks with the same mark share what it stands for; a mark is not negative."""
    place = council.place
    marks = council.largest([mark if rank == place.rank else -1.0 for rank in range(place.world)])
    most = max(marks.count(one) for one in marks if one >= 0)
    return Sharing(most, marks[: place.rank].count(mark))


def cut_units(steps: MeasuredSteps, parameters: Mapping[str, ParameterInfo]) -> list[Parts]:
    """What can be decided by itself of each unit that was measured: its buckets, and of the last one its large parameters."""
    last = steps.units[-1][-1]
    numels = {name: parameters[name].numel for name in last}
    large = [name for name in last if numels[name] >= LARGE_SHARE * sum(numels.values())]
    if len(large) > 1:
        # The small ones go with the last of them.
        rest = tuple(name for name in last if name not in large[:-1])
        pieces: Parts = (*((name,) for name in large[:-1]), rest)
    else:
        pieces = (last,)
    return [*steps.units[:-1], (*steps.units[-1][:-1], *pieces)]


def make_profile(
    steps: MeasuredSteps,
    meter: EnergyMeter,
    parameters: Mapping[str, ParameterInfo],
    *,
    council: Council,
    device: torch.device,
    work: Mapping[str, WorkCost],
    prices: MeasuredPrices | None,
    coalesce_bytes: int,
) -> Profile:
    """Everything together; times are those of the slowest rank."""
    *ready, rest = council.largest([*steps.ready_s, steps.rest_s])
    units = []
    for parts, moment in zip(cut_units(steps, parameters), ready, strict=True):
        for names in parts:
            points = meter.curve(names)
            curve = EnergyCurve(points) if points else UNIFORM_CURVE
            units.append(Unit(names, moment, curve, with_next=names != parts[-1]))
    on_cuda = device.type == "cuda"
    return Profile(
        world=council.place.world,
        device=torch.cuda.get_device_name(device) if on_cuda else "CPU",
        units=tuple(units),
        rest_s=rest,
        sharing=find_sharing(council, device).workers,
        decode_on_link=not on_cuda,
        parameters=tuple(parameters.values()),
        work=dict(work),
        prices=prices,
        coalesce_bytes=coalesce_bytes,
    )
