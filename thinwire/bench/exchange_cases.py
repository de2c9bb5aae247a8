"""What `thinwire bench exchange` compares: the methods, their formulas, and workers that take one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.compress import GroupStep, Opened, Terms
from thinwire.errors import UsageError
from thinwire.exchange import Place
from thinwire.layout import BucketLayout, Group, ParameterInfo, SlotKind
from thinwire.methods import Method
from thinwire.tools.methods import build_method, keep_taken
from thinwire.tools.settings.building import Plain, check_fields
from thinwire.tools.settings.kinds import Density, Positive, Positives, Ranks

Words = Callable[[int, int, int], float]

WORD = 4
LAYERS = 8


@dataclass(frozen=True)
class ExchangeCase:
    """A method and the words its paper promises for k of n entries among P ranks."""

    name: str
    method: str
    """Its name among thinwire's methods."""
    formula: str
    words: Words
    settings: Plain = field(default_factory=dict)

    def make(self, measured: ExchangePlan) -> Method:
        asked = keep_taken(self.method, density=measured.density, values=measured.values)
        return build_method(self.method, {**asked, **self.settings})


OKTOPK: tuple[str, Words] = ("6k(P-1)/P", lambda k, n, p: 6 * k * (p - 1) / p)
FULL = {"exchange": {"contribution": "full"}}
LEADER = {"exchange": {"kind": "CyclicLeader"}}
CASES = {
    case.name: case
    for case in (
        ExchangeCase("dense", "dense", "2n(P-1)/P", lambda k, n, p: 2 * n * (p - 1) / p),
        ExchangeCase("topka", "topka", "2k(P-1)", lambda k, n, p: 2 * k * (p - 1)),
        ExchangeCase(
            "topkdsa", "topkdsa", "(2k+n)(P-1)/P", lambda k, n, p: (2 * k + n) * (p - 1) / p
        ),
        ExchangeCase("gtopk", "gtopk-conserve", "4k log P", lambda k, n, p: 4 * k * math.log2(p)),
        ExchangeCase("oktopk", "oktopk", *OKTOPK),
        ExchangeCase("oktopk-published", "oktopk-published", *OKTOPK),
        ExchangeCase("oktopk-full", "oktopk", *OKTOPK, settings=FULL),
        ExchangeCase(
            "leader", "topk", "k+2k(P-1)/P", lambda k, n, p: k + 2 * k * (p - 1) / p, LEADER
        ),
        ExchangeCase("exclusive", "exclusive", "3k(P-1)/P", lambda k, n, p: 3 * k * (p - 1) / p),
    )
}


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """What is exchanged, by how many ranks, how often."""

    methods: str = "all"
    """'all' or some of {CASES}, with commas."""
    ranks: Ranks = 4
    """Processes to start (not under torchrun)."""
    virtual: Positives = ()
    """Count words on so many virtual ranks instead: 4,16,64,256."""
    count: Positives = (1048576,)
    """Elements of the gradient, with commas."""
    density: Density = 0.01
    """Fraction kept."""
    values: str = "fp32"
    """Value code: fp32, bf16 or fp16."""
    iters: Positive = 10
    """Steps to measure."""

    def __post_init__(self) -> None:
        check_fields(self)

    def cases(self) -> list[ExchangeCase]:
        return find_cases(self.methods)


def find_cases(names: str) -> list[ExchangeCase]:
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
        # Not aligned: the exchanges are compared by what their plain parts do.
        terms = Terms(place, group.dtype, aligned=False)
        self.plan = method.compressor().plan(group, terms)
        self.steps = 0

    def open(self, gradient: Tensor) -> Opened:
        counts = [self.steps]
        self.steps += 1
        route = self.plan.route(self.plan.begin(counts))
        return route.open(GroupStep(gradient, counts, None))
