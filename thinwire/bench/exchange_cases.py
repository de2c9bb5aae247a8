"""What `thinwire bench exchange` compares: the methods, their formulas, and workers that take one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressor import Compressor, GroupStep, Opened
from thinwire.errors import UsageError
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.requests import Place
from thinwire.exchange.split import SplitReduce
from thinwire.layout import BucketLayout, ParameterInfo, SlotKind
from thinwire.methods.base import Dense, Method
from thinwire.methods.exclusive import ExclusiveTopK
from thinwire.methods.gtopk import GTopK
from thinwire.methods.oktopk import OkTopK
from thinwire.methods.topk import TopK
from thinwire.methods.topka import TopKA
from thinwire.methods.topkdsa import TopKDSA
from thinwire.plan.groups import Group
from thinwire.wire.codec import Flags

WORD = 4
LAYERS = 8


@dataclass(frozen=True)
class Case:
    """A method and the words its paper promises for k of n entries among P ranks."""

    name: str
    make: Callable[[float, str], Method]
    formula: str
    words: Callable[[int, int, int], float]
    both_ways: bool = False
    """Whether the formula counts what the busiest rank sends and receives, as for a tree."""


def _gtopk(k: int, n: int, world: int) -> float:
    return 4 * k * math.ceil(math.log2(world)) if world > 1 else 0.0


CASES = {
    case.name: case
    for case in (
        Case("dense", lambda d, v: Dense(), "2n(P-1)/P", lambda k, n, p: 2 * n * (p - 1) / p),
        Case(
            "topka",
            lambda d, v: TopKA(density=d, values=v),
            "2k(P-1)",
            lambda k, n, p: 2 * k * (p - 1),
        ),
        Case(
            "topkdsa",
            lambda d, v: TopKDSA(density=d, values=v),
            "(2k+n)(P-1)/P",
            lambda k, n, p: (2 * k + n) * (p - 1) / p,
        ),
        Case(
            "gtopk",
            lambda d, v: GTopK(density=d, values=v, conserve=True),
            "4k log P",
            _gtopk,
            both_ways=True,
        ),
        Case(
            "oktopk",
            lambda d, v: OkTopK(density=d, values=v),
            "6k(P-1)/P",
            lambda k, n, p: 6 * k * (p - 1) / p,
        ),
        Case(
            "oktopk-published",
            lambda d, v: OkTopK(density=d, values=v, thresholds="published"),
            "6k(P-1)/P",
            lambda k, n, p: 6 * k * (p - 1) / p,
        ),
        Case(
            "oktopk-full",
            lambda d, v: OkTopK(density=d, values=v, exchange=SplitReduce(contribution="full")),
            "6k(P-1)/P",
            lambda k, n, p: 6 * k * (p - 1) / p,
        ),
        Case(
            "leader",
            lambda d, v: TopK(density=d, values=v, exchange=CyclicLeader()),
            "k+2k(P-1)/P",
            lambda k, n, p: k + 2 * k * (p - 1) / p,
        ),
        Case(
            "exclusive",
            lambda d, v: ExclusiveTopK(density=d, values=v),
            "3k(P-1)/P",
            lambda k, n, p: 3 * k * (p - 1) / p,
        ),
    )
}


def find_cases(names: str) -> list[Case]:
    """Cases by comma-separated names; "all" for every one."""
    if names == "all":
        return list(CASES.values())
    unknown = [name for name in names.split(",") if name not in CASES]
    if unknown:
        raise UsageError(f"methods is {names!r}; it must be 'all' or some of {', '.join(CASES)}")
    return [CASES[name] for name in names.split(",")]


def run_name(case: str, numel: int, world: int) -> str:
    """What a ledger calls the steps of one case."""
    return f"{case} count={numel} ranks={world}"


def make_group(numel: int, device: torch.device) -> Group:
    """`numel` elements as one parameter."""
    info = ParameterInfo("weight", (numel,), (1,), torch.float32, SlotKind.LINEAR)
    layout = BucketLayout((info.slot(0),), numel, torch.float32, device)
    return Group.of(layout, layout.slots, torch.float32)


def make_gradient(numel: int, rank: int, step: int, device: torch.device) -> Tensor:
    """Laplace values in layers of different scale, half of each shared by all ranks."""

    def draw(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        half = torch.rand(numel, generator=generator, device=device) - 0.5
        return -half.sign() * (1 - 2 * half.abs()).clamp(min=1e-7).log()

    scale = 2.0 ** torch.arange(-LAYERS // 2, LAYERS // 2, device=device)
    layer = torch.arange(numel, device=device) * LAYERS // numel
    return (draw(1_000_003 * step) + draw(1_000_003 * step + 1 + rank)) * scale[layer]


class Worker:
    """One rank of one method, stepped by hand."""

    def __init__(self, method: Method, group: Group, place: Place) -> None:
        self.compressor: Compressor = method.compressor()
        self.group = group
        self.place = place
        self.steps = 0

    def open(self, gradient: Tensor) -> Opened:
        flags = Flags(
            non_finite=torch.zeros((), dtype=torch.bool, device=gradient.device),
            had_gradient=torch.ones(1, dtype=torch.bool, device=gradient.device),
        )
        step = GroupStep(
            group=self.group,
            gradients=[gradient],
            flags=flags,
            steps=[self.steps],
            scale=None,
            place=self.place,
            deterministic=False,
        )
        self.steps += 1
        return self.compressor.open(step)
