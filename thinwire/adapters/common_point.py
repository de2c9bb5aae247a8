"""CommonPoint: where all workers were when they last met, in full precision, and the fragments it is exchanged in."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong

from thinwire.engine.network import broadcast_into
from thinwire.errors import UsageError
from thinwire.layout import (
    Bucket,
    BucketLayout,
    ParameterInfo,
    Shard,
    lay_out,
    local_part,
    memory_strides,
    wide_dtype,
)

ALIGNMENT = 256
"""Bytes."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """Parameters whose rounds are one, and the buckets in which they travel. Other fragments' buckets are in the same memory."""

    names: Sequence[str]
    buckets: Sequence[Bucket]


def find_shard(parameter: Tensor) -> Shard | None:
    """Which part of a parameter this rank has, where it is cut along one dimension of a mesh; else None."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != 1:
        return None
    (placement,) = parameter.placements
    if not isinstance(placement, ShardedAlong):
        return None
    mesh, size = parameter.device_mesh, parameter.shape[placement.dim]
    # As torch.chunk cuts it: the last shards are shorter, or empty.
    longest = -(-size // mesh.size())
    begin = min(size, mesh.get_local_rank() * longest)
    length = min(longest, size - begin)
    return Shard(tuple(parameter.shape), placement.dim, begin, 0, length)


def forget_gathered(module: nn.Module) -> None:
    """Have FSDP drop the whole parameters that an evaluation has left: they would hide the shards, which move."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        # Not imported, so that nothing is sharded.
        return
    for child in module.modules():
        if isinstance(child, fsdp.FSDPModule):
            child.reshard()


class CommonPoint:
    """A float32 copy of every parameter (or of this rank's shard of it), which the outer optimizer steps."""

    def __init__(
        self,
        described: Mapping[str, tuple[nn.Parameter, ParameterInfo]],
        device: str | torch.device | None,
    ) -> None:
        self.parameters = {name: pair[0] for name, pair in described.items()}
        self.sharded = any(isinstance(p, DTensor) for p in self.parameters.values())
        self.tensors: dict[str, nn.Parameter] = {}
        self.infos: dict[str, ParameterInfo] = {}
        for name, (parameter, info) in described.items():
            local = local_part(parameter.detach())
            copied = local.to(device or local.device, wide_dtype(local.dtype), copy=True)
            self.tensors[name] = nn.Parameter(copied)
            self.infos[name] = replace(
                info,
                shape=tuple(local.shape),
                strides=memory_strides(local),
                dtype=copied.dtype,
                shard=find_shard(parameter),
            )

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        found = {local_part(p).device for p in self.parameters.values()}
        if len(found) > 1:
            raise UsageError(
                f"the model's parameters are on {', '.join(sorted(map(str, found)))}; they must be on one device"
            )
        return found.pop()

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write_distance(self, bucket: Bucket) -> None:
        """Fill a bucket with the pseudo-gradient: the point as parameters can hold it, less where they are.

        What a narrow parameter cannot hold of the point is nobody's way, and stays in the point.
        """
        for slot in bucket.layout.slots:
            local, view = local_part(self.parameters[slot.name]), slot.view(bucket.flat)
            view.copy_(self.tensors[slot.name].to(local.dtype)).sub_(local)

    @contextmanager
    def updates(self, fragment: Fragment) -> Iterator[None]:
        """Inside, the fragment's tensors have what its buckets hold as their gradient, and no others have any."""
        for name, update in self._views(fragment):
            self.tensors[name].grad = update.to(self.tensors[name].device)
        try:
            yield
        finally:
            for name in fragment.names:
                self.tensors[name].grad = None

    def subtract(self, fragment: Fragment) -> None:
        """point = point - what the fragment's buckets hold, without the outer optimizer."""
        for name, update in self._views(fragment):
            tensor = self.tensors[name].detach()
            tensor.sub_(update.to(tensor.device))

    def move_parameters(self, fragment: Fragment, keep_local: float) -> None:
        """parameter = keep_local x parameter + (1 - keep_local) x point."""
        for name in fragment.names:
            local, point = local_part(self.parameters[name]), self.tensors[name].detach()
            target = point.to(local.device)
            if keep_local:
                target = target.lerp(local.to(target.dtype), keep_local)
            local.copy_(target)

    # -- state -------------------------------------------------------------------------------------------------

    def read(self, fragment: Fragment) -> dict[str, Tensor]:
        """What the fragment's buckets hold, by name."""
        return {name: view.clone() for name, view in self._views(fragment)}

    def write(self, fragment: Fragment, contents: Mapping[str, Tensor]) -> None:
        for name, view in self._views(fragment):
            view.copy_(contents[name])

    def load(self, saved: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            if name not in saved or saved[name].shape != tensor.shape:
                found = list(saved[name].shape) if name in saved else "nothing"
                raise UsageError(
                    f"state has {found} for the common point of {name!r}, which has shape {list(tensor.shape)}"
                )
        for name, tensor in self.tensors.items():
            tensor.detach().copy_(saved[name])

    def share(self, root: int, group: dist.ProcessGroup) -> None:
        """Give all ranks of the group the point of rank `root`."""
        for name, tensor in self.tensors.items():
            travelling = tensor.detach().to(local_part(self.parameters[name]).device)
            broadcast_into(travelling, root, group)
            tensor.detach().copy_(travelling)

    def _views(self, fragment: Fragment) -> Iterator[tuple[str, Tensor]]:
        for bucket in fragment.buckets:
            for slot in bucket.layout.slots:
                yield slot.name, slot.view(bucket.flat)


def cut_into_fragments(
    point: CommonPoint, count: int, device: torch.device, bucket_bytes: int
) -> list[Fragment]:
    """`count` runs of neighbouring parameters with about as many elements each. One travels at a time, so they share memory."""
    # All ranks of a node cut alike, whatever each has of a parameter.
    names = [name for name in point.tensors if point.infos[name].full.numel]
    if count > len(names):
        raise UsageError(
            f"fragments is {count}; it must be at most the number of parameters, {len(names)}"
        )
    total = sum(point.infos[name].full.numel for name in names)
    parts: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for place, name in enumerate(names):
        # Not beyond what leaves a parameter for each fragment behind, and not so early that one is skipped.
        wished = min(count - 1, before * count // max(1, total))
        index = max(wished, count - (len(names) - place))
        first_empty = next((i for i, part in enumerate(parts) if not part), count - 1)
        parts[min(index, first_empty)].append(name)
        before += point.infos[name].full.numel
    layouts = [cut_into_layouts(point, part, device, bucket_bytes) for part in parts]
    memory = torch.zeros(max(map(needed_bytes, layouts)), dtype=torch.uint8, device=device)
    return [
        Fragment(part, place_buckets(found, memory))
        for part, found in zip(parts, layouts, strict=True)
    ]


def make_fragment(
    point: CommonPoint, names: Sequence[str], device: torch.device, bucket_bytes: int
) -> Fragment:
    """These parameters as a fragment of their own, in memory of its own."""
    layouts = cut_into_layouts(point, names, device, bucket_bytes)
    memory = torch.zeros(needed_bytes(layouts), dtype=torch.uint8, device=device)
    return Fragment(names, place_buckets(layouts, memory))


def cut_into_layouts(
    point: CommonPoint, names: Sequence[str], device: torch.device, bucket_bytes: int
) -> list[BucketLayout]:
    """Neighbours of one dtype together, up to so many bytes, and at least one in each."""
    runs: list[list[ParameterInfo]] = []
    filled = 0
    for name in names:
        info = point.infos[name]
        nbytes = info.numel * info.dtype.itemsize
        if not nbytes:
            continue
        if not runs or runs[-1][0].dtype != info.dtype or filled + nbytes > bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(info)
        filled += nbytes
    return [lay_out(run, run[0].dtype, device) for run in runs]


def aligned_bytes(layout: BucketLayout) -> int:
    """What a bucket takes, so that the next one begins where vectors of all kernels may."""
    nbytes = layout.numel * layout.dtype.itemsize
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def needed_bytes(layouts: Sequence[BucketLayout]) -> int:
    return sum(map(aligned_bytes, layouts))


def place_buckets(layouts: Sequence[BucketLayout], memory: Tensor) -> list[Bucket]:
    """Buckets one behind the other in this memory."""
    pieces = memory[: needed_bytes(layouts)].split(list(map(aligned_bytes, layouts)))
    return [
        Bucket(layout, piece.view(layout.dtype)[: layout.numel])
        for layout, piece in zip(layouts, pieces, strict=True)
    ]
