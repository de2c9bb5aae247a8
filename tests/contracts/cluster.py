"""Cluster: the pipelines of several ranks inside one process, fed with gradients by name.

The contracts hold below the adapters too, and here a grid of them costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.futures import Future

import thinwire as tw
from thinwire.exchange.drivers import Driver, run_virtual
from thinwire.exchange.requests import Place, Program
from thinwire.layout import (
    Bucket,
    BucketLayout,
    ParameterInfo,
    SlotKind,
    contiguous_strides,
    kind_from_shape,
)
from thinwire.methods.base import Method
from thinwire.observe.ledger import Ledger
from thinwire.observe.stats import Tally
from thinwire.pipeline import Pipeline
from thinwire.plan.policy import Rule, make_plan

Gradients = Mapping[str, Tensor]
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (8, 4, 3, 3),
    "bias": (8,),
    "linear": (33, 40),
    "scalar": (),
    "head": (10, 64),
}


class Collector(Driver):
    """Keeps the programs, so that those of all ranks can run in lockstep."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.programs: list[Program[Tensor]] = []

    def start(
        self, program: Program[Tensor], future: Future[Tensor] | None = None
    ) -> Future[Tensor]:
        self.programs.append(program)
        return self.new_future() if future is None else future

    def close(self) -> None: ...


def parameter(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    strides: Sequence[int] | None = None,
    kind: SlotKind | None = None,
) -> ParameterInfo:
    return ParameterInfo(
        name,
        tuple(shape),
        tuple(strides or contiguous_strides(shape)),
        dtype,
        kind or kind_from_shape(len(shape)),
    )


class Cluster:
    def __init__(
        self,
        world: int,
        method: Method,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        dtype: torch.dtype = torch.float32,
        policy: Sequence[Rule] = (),
        deterministic: bool = False,
        scale: Callable[[], Tensor | None] = lambda: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.world = world
        self.device = torch.device(device)
        self.dtype = dtype
        self.infos = {n: parameter(n, s, dtype) for n, s in (shapes or SHAPES).items()}
        self.policy = policy
        self.buckets = [list(self.infos)]
        self.drivers = [Collector(Place(rank, world)) for rank in range(world)]
        self.pipelines = [
            Pipeline(
                self.plan(method),
                driver,
                Tally(Ledger(world)),
                device=self.device,
                deterministic=deterministic,
                scale=scale,
            )
            for driver in self.drivers
        ]
        self._layouts: dict[tuple[str, ...], list[BucketLayout]] = {}

    def plan(self, method: Method):
        return make_plan(self.infos.values(), method, self.policy, self.world)

    def switch(self, method: Method) -> None:
        for pipeline in self.pipelines:
            pipeline.switch(self.plan(method))

    def random(self, seed: int, factor: float = 1.0) -> list[dict[str, Tensor]]:
        """Gradients of all ranks."""
        generator = torch.Generator().manual_seed(seed)
        return [
            {
                name: (factor * torch.randn(info.shape, generator=generator)).to(self.dtype)
                for name, info in self.infos.items()
            }
            for _ in range(self.world)
        ]

    def step(self, gradients: Sequence[Gradients]) -> list[dict[str, Tensor]]:
        """One synchronising backward in the current bucketing; every rank's update by name."""
        updates: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        for names in self.buckets:
            layouts = self._layout(names)
            flats = []
            for rank in range(self.world):
                flat = torch.zeros(layouts[rank].numel, dtype=self.dtype, device=self.device)
                for slot in layouts[rank].slots:
                    slot.view(flat).copy_(gradients[rank][slot.name])
                flats.append(flat)
                self.pipelines[rank].reduce(Bucket(layouts[rank], flat))
            results = run_virtual([driver.programs.pop() for driver in self.drivers])
            for rank, flat in enumerate(results):
                assert flat is flats[rank]
                for slot in layouts[rank].slots:
                    updates[rank][slot.name] = slot.view(flat).clone()
        return updates

    def _layout(self, names: Sequence[str]) -> list[BucketLayout]:
        key = tuple(names)
        if key not in self._layouts:
            slots, offset = [], 0
            for name in names:
                slots.append(self.infos[name].slot(offset))
                offset += self.infos[name].numel
            self._layouts[key] = [
                BucketLayout(tuple(slots), offset, self.dtype, self.device)
                for _ in range(self.world)
            ]
        return self._layouts[key]

    def accepted(self, rank: int) -> dict[str, Tensor]:
        """What the rank has sent in the current step and not been given back, by name."""
        found: dict[str, Tensor] = {}
        pipeline = self.pipelines[rank]
        for groups in pipeline._groups.values():
            for compressor, group in groups:
                for account in pipeline._book.accounts:
                    bound = compressor.memory and compressor.memory.stores.get("residual")
                    if bound and bound.bind(group).flat is account.c:
                        dense = account.accepted()
                        found.update({s.name: s.view(dense).clone() for s in group.slots})
        return found

    def residuals(self, rank: int) -> dict[str, Tensor]:
        """What is held back, zeros where nothing is."""
        self.pipelines[rank].settle()
        held = {name: self.pipelines[rank].roster.held(name, "residual") for name in self.infos}
        wide = torch.promote_types(self.dtype, torch.float32)
        return {
            name: values
            if values is not None
            else torch.zeros(self.infos[name].shape, dtype=wide, device=self.device)
            for name, values in held.items()
        }


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, but for the sign of zero."""
    return left.dtype == right.dtype and bool(torch.equal(left, right))


def sparse(values: str = "fp32", density: float = 0.05, **options) -> tw.ADTopK:
    return tw.ADTopK(density=density, values=values, dense_fallback=False, **options)
