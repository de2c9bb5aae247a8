"""Cluster: the reducers of several ranks inside one process, fed with gradients by name.

The contracts hold below the adapters too, and here a grid of them costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import thinwire as tw
from thinwire.compress.kernel_routes import KernelRoute
from thinwire.engine.reducer import Reducer
from thinwire.engine.virtual import VirtualCluster
from thinwire.kernels.cuda.prepared import PreparedKernels
from thinwire.layout import (
    Bucket,
    BucketLayout,
    ParameterInfo,
    SlotKind,
    contiguous_strides,
    kind_from_shape,
    lay_out,
)
from thinwire.methods.base import Method
from thinwire.plan.policy import Rule

Gradients = Mapping[str, Tensor]
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (8, 4, 3, 3),
    "bias": (8,),
    "linear": (33, 40),
    "scalar": (),
    "head": (10, 64),
}


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
        strides: Mapping[str, Sequence[int]] | None = None,
        dtype: torch.dtype = torch.float32,
        policy: Sequence[Rule] = (),
        deterministic: bool = False,
        checksum: bool = False,
        restorable: bool = False,
        scale: Callable[[], Tensor | None] = lambda: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.world = world
        self.device = torch.device(device)
        self.dtype = dtype
        strides = strides or {}
        self.infos = {
            name: parameter(name, shape, dtype, strides.get(name))
            for name, shape in (shapes or SHAPES).items()
        }
        self.policy = policy
        self.buckets = [list(self.infos)]
        self.ranks = VirtualCluster(world)
        self.reducers = [
            Reducer(
                self.infos,
                method,
                driver,
                device=self.device,
                policy=policy,
                scale=scale,
                deterministic=deterministic,
                checksum=checksum,
                restorable=restorable,
            )
            for driver in self.ranks.drivers
        ]
        self._layouts: dict[tuple[str, ...], list[BucketLayout]] = {}

    def switch(self, method: Method) -> None:
        for reducer in self.reducers:
            reducer.switch(method, self.policy)

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
            layouts = self.layouts_of(names)
            flats = []
            for rank in range(self.world):
                flat = torch.zeros(layouts[rank].numel, dtype=self.dtype, device=self.device)
                for slot in layouts[rank].slots:
                    slot.view(flat).copy_(gradients[rank][slot.name])
                flats.append((flat, self.reducers[rank].reduce(Bucket(layouts[rank], flat))))
            for _, future in flats:
                if future.done():
                    future.value()  # raises what went wrong
            self.ranks.run()
            for rank, (flat, future) in enumerate(flats):
                assert future.value() is flat
                for slot in layouts[rank].slots:
                    updates[rank][slot.name] = slot.view(flat).clone()
        for reducer in self.reducers:
            reducer.end_backward()
        return updates

    def layouts_of(self, names: Sequence[str]) -> list[BucketLayout]:
        """Of a bucket with these parameters, one per rank; the same in every step."""
        key = tuple(names)
        if key not in self._layouts:
            infos = [self.infos[name] for name in names]
            self._layouts[key] = [
                lay_out(infos, self.dtype, self.device) for _ in range(self.world)
            ]
        return self._layouts[key]

    def rebucket(self) -> None:
        """From now on buckets have new layouts, as after DDP has rebuilt its own."""
        self._layouts.clear()

    def accepted(self, rank: int) -> dict[str, Tensor]:
        """What the rank has sent in the current step and not been given back, by name."""
        return self.reducers[rank].record.accepted()

    def residuals(self, rank: int) -> dict[str, Tensor]:
        """What is held back, zeros where nothing is."""
        return self.held(rank, "residual")

    def held(self, rank: int, store: str) -> dict[str, Tensor]:
        """What a memory holds under a name, zeros where nothing is."""
        self.reducers[rank].settle()
        held = {name: self.reducers[rank].assignments.held(name, store) for name in self.infos}
        wide = torch.promote_types(self.dtype, torch.float32)
        return {
            name: values
            if values is not None
            else torch.zeros(self.infos[name].shape, dtype=wide, device=self.device)
            for name, values in held.items()
        }


def kernels_of(cluster: Cluster, rank: int = 0) -> list[PreparedKernels]:
    """The kernels of all routes that a rank has taken; none where it runs the parts they stand for."""
    ways = [way for plan in cluster.reducers[rank].plans.values() for way in plan.ways.values()]
    routes = [route for way in ways for route in way.routes]
    return [route.kernels for route in routes if isinstance(route, KernelRoute)]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, but for the sign of zero."""
    return left.dtype == right.dtype and bool(torch.equal(left, right))


def sparse(values: str = "fp32", density: float = 0.05, **options) -> tw.ADTopK:
    return tw.ADTopK(density=density, values=values, dense_fallback=False, **options)
