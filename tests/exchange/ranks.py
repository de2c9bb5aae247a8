"""Virtual ranks around one exchange: memory, selection and wire as in a real handle, all ranks in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.compress import GroupStep, Opened, Terms
from thinwire.compress.sparse import SparseCompressor
from thinwire.engine.virtual import run_virtual
from thinwire.exchange.base import Exchange, Outcome
from thinwire.exchange.requests import Place
from thinwire.layout import BucketLayout, Group, ParameterInfo, SlotKind, contiguous_strides
from thinwire.memory.residual import Residual
from thinwire.observe.ledger import Ledger, Traffic
from thinwire.select.base import Selector
from thinwire.select.topk import TradTopK
from thinwire.wire.codec import Flags
from thinwire.wire.format import Wire

Shapes = Sequence[tuple[int, ...]]


def make_group(
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
    names: Sequence[str] = (),
    device: str = "cpu",
) -> Group:
    slots, offset = [], 0
    for which, shape in enumerate(shapes):
        name = names[which] if names else f"p{which}.weight"
        kind = SlotKind.LINEAR if len(shape) == 2 else SlotKind.VECTOR
        info = ParameterInfo(name, shape, contiguous_strides(shape), dtype, kind)
        slots.append(info.slot(offset))
        offset += info.numel
    layout = BucketLayout(tuple(slots), offset, dtype, torch.device(device))
    return Group.of(layout, layout.slots, dtype)


@dataclass
class Step:
    """One step of all ranks."""

    before: list[Tensor]
    """c of each rank."""
    after: list[Tensor]
    """Residual of each rank."""
    accepted: list[Tensor]
    outcomes: list[Outcome]
    ledgers: list[Ledger]

    @property
    def traffic(self) -> list[Traffic]:
        return [ledger.total() for ledger in self.ledgers]

    @property
    def update(self) -> Tensor:
        return self.outcomes[0].update


@dataclass
class Ranks:
    """P ranks with one group of slots and one exchange."""

    exchange: Exchange
    world: int
    shapes: Shapes = ((1000,),)
    density: float = 0.01
    values: str = "fp32"
    select: Selector | None = None
    names: Sequence[str] = ()
    dtype: torch.dtype = torch.float32
    per_host: int | None = None
    device: str = "cpu"
    steps: int = 0
    compressors: list[SparseCompressor] = field(init=False)

    def __post_init__(self) -> None:
        self.group = make_group(self.shapes, self.dtype, self.names, self.device)
        wire = Wire(values=self.values, indices="int32")
        self.compressors = [
            SparseCompressor(
                self.select or TradTopK(self.density),
                Residual(),
                wire.value_code,
                wire.index_code,
                self.exchange,
            )
            for _ in range(self.world)
        ]
        # Not aligned: the parts themselves are tested here, whatever the device.
        self.plans = [
            one.plan(self.group, Terms(Place(rank, self.world), self.dtype, aligned=False))
            for rank, one in enumerate(self.compressors)
        ]
        self.routes = [{} for _ in self.plans]

    @property
    def k(self) -> int:
        rows = [self.compressors[0].session.selector.rows(slot) for slot in self.group.slots]
        return sum(r.entries for r in rows)

    def residual(self, rank: int) -> Tensor:
        return self.compressors[rank].memory.stores["residual"].bind(self.group).flat

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        settle: bool = True,
        had: Tensor | None = None,
        bad: Sequence[bool] = (),
    ) -> Step:
        """Exchange one flat gradient per rank (as long as all slots together)."""
        opened: list[Opened] = []
        before = []
        for rank, gradient in enumerate(gradients):
            # Opening may write off already, so c is what memory holds plus the gradient.
            before.append(self.residual(rank) + self.flat(gradient))
            seen = None if had is None else had[rank]
            opened.append(self.open(rank, gradient, seen, bool(bad[rank]) if bad else False))
        ledgers = [Ledger(self.world) for _ in range(self.world)]
        outcomes = run_virtual([o.program for o in opened], ledgers, per_host=self.per_host)
        accepted = [o.account.accepted() for o in opened]
        if settle:
            any_bad = torch.stack([o.non_finite for o in outcomes]).any()
            for one in opened:
                one.account.settle(any_bad)
        self.steps += 1
        after = [self.residual(rank).clone() for rank in range(self.world)]
        return Step(before, after, accepted, outcomes, ledgers)

    def open(
        self, rank: int, gradient: Tensor, had: Tensor | None = None, bad: bool = False
    ) -> Opened:
        """One rank's program of the next step."""
        pieces = list(gradient.clone().split([slot.numel for slot in self.group.slots]))
        seen = torch.stack([piece.any() for piece in pieces]) if had is None else had
        counts = [self.steps] * len(pieces)
        plan = self.plans[rank]
        modes = plan.begin(counts)
        routes = self.routes[rank]
        if modes not in routes:
            routes[modes] = plan.route(modes)
        flags = Flags(torch.full((), bad, device=self.device), seen)
        return routes[modes].begin(flags, pieces, GroupStep(gradient, counts, None))

    def flat(self, gradient: Tensor) -> Tensor:
        """A gradient in the group's own layout."""
        out = torch.zeros(self.group.numel, dtype=gradient.dtype, device=gradient.device)
        for slot, piece in zip(
            self.group.slots, gradient.split([s.numel for s in self.group.slots]), strict=True
        ):
            slot.span(out).copy_(piece)
        return out

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.group.slots)


KINDS = (
    "normal",
    "heavy tail",
    "one region",
    "ties",
    "zero",
    "one rank zero",
    "cancelling",
    "integers",
    "denormal",
)


def gradients(kind: str, world: int, numel: int, seed: int = 0) -> list[Tensor]:
    """Inputs that sparse exchanges get wrong."""
    generator = torch.Generator().manual_seed(seed * 7919 + world * 31 + numel)
    normal = [torch.randn(numel, generator=generator) for _ in range(world)]
    match kind:
        case "normal":
            return normal
        case "heavy tail":
            return [g**5 for g in normal]
        case "one region":
            return [torch.where(torch.arange(numel) < max(1, numel // 10), g, 0.0) for g in normal]
        case "ties":
            return [torch.ones(numel) * (-1) ** rank for rank in range(world)]
        case "zero":
            return [torch.zeros(numel) for _ in range(world)]
        case "one rank zero":
            return [torch.zeros(numel), *normal[1:]]
        case "cancelling":
            return [normal[0] * (-1) ** rank for rank in range(world)]
        case "integers":
            return [(4 * g).round() for g in normal]
        case "denormal":
            return [g * 1e-40 for g in normal]
    raise ValueError(kind)


def check_step(step: Step, world: int, *, exact: bool = True, tolerance: float = 1e-6) -> None:
    """Contracts 1 and 2: the same bits everywhere, and nothing lost."""
    first = step.outcomes[0]
    for outcome in step.outcomes[1:]:
        assert torch.equal(first.update.view(torch.uint8), outcome.update.view(torch.uint8))
        assert bool(first.non_finite) == bool(outcome.non_finite)
    for before, after, accepted in zip(step.before, step.after, step.accepted, strict=True):
        if exact:
            assert torch.equal(accepted + after, before)
        else:
            # An owner also banks what rounding a sum to a narrow wire lost: some ulp of what was added up.
            scale = torch.stack(step.before).abs().sum(0)
            assert bool(((accepted + after - before).abs() <= 2.0**-23 * scale + 1e-44).all())
    total = sum(before.double() for before in step.before)
    held = sum(after.double() for after in step.after)
    error = (total - held - world * first.update.double()).abs().sum()
    # A denormal sum has no relative precision to lose 1e-6 of.
    assert (
        error
        <= tolerance * sum(b.double().abs().sum() for b in step.before) + 1e-43 * total.numel()
    )


def grid(*columns: Sequence[object]) -> list[tuple[object, ...]]:
    return list(itertools.product(*columns))
