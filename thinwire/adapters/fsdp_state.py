"""Sharded state: what a handle of a sharded model saves.

Memory is saved as DTensors over the ranks of one replica, as the parameters themselves are. So one checkpoint holds all
shards under one name, and a model that is cut into other shards can read it. What a selection has learned belongs to a
shard, and is kept by the place of the rank among the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from thinwire.adapters.fsdp_units import Unit
from thinwire.engine.checkpoint import WHOLE, WholeTensors
from thinwire.errors import UsageError
from thinwire.layout import contiguous_strides, local_part

OWN = ("selection", "shards")
"""What of a rank's content belongs to its shard."""


Spread = tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]]
"""(the ranks of a replica, how a parameter is spread over them, its full shape)."""


def make_form(units: Iterable[Unit]) -> WholeTensors:
    """How the memory of these units' parameters is saved."""
    spread = {
        name: (mesh, placements, tuple(unit.parameters[name].shape))
        for unit in units
        for name, mesh, placements in unit.spread()
    }
    return ShardedTensors(spread) if spread else WHOLE


class ShardedTensors(WholeTensors):
    """Saves parameters that are spread over the ranks of a replica."""

    def __init__(self, spread: Mapping[str, Spread]) -> None:
        self._spread = spread
        widest = max((mesh for mesh, _, _ in spread.values()), key=lambda mesh: mesh.ndim)
        at = "x".join(map(str, widest.get_coordinate() or ()))
        self._of = "x".join(map(str, widest.mesh.shape))
        self.column = f"shard {at} of {self._of}"
        self.own = f"columns.{self.column}."

    def groups(self) -> list[dist.ProcessGroup]:
        found: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for mesh, _, _ in self._spread.values():
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                if group.size() > 1:
                    found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
        return list(found.values())

    def pack(self, content: dict[str, Any]) -> dict[str, Any]:
        shared = {key: values for key, values in content.items() if key not in OWN}
        own = {key: content[key] for key in OWN if key in content}
        memory = {
            store: {name: self._join(name, held) for name, held in contents.items()}
            for store, contents in content["memory"].items()
        }
        return {**shared, "memory": memory, "columns": {self.column: own}}

    def fits(self, content: Mapping[str, Any]) -> bool:
        return self.column in content.get("columns", {})

    def unpack(self, content: Mapping[str, Any]) -> dict[str, Any]:
        columns = content.get("columns", {})
        if self.column not in columns:
            raise UsageError(
                f"state belongs to {', '.join(columns) or 'whole parameters'}, this is {self.column}; only a distributed "
                "checkpoint can be read by other shards, with handle.load_checkpoint(path), and on_world_change='reset' "
                "goes on with nothing held back"
            )
        memory = {
            store: {name: local_part(held) for name, held in contents.items()}
            for store, contents in content["memory"].items()
        }
        rest = {key: values for key, values in content.items() if key != "columns"}
        return {**rest, **columns[self.column], "memory": memory}

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if name not in self._spread:
            return torch.empty(shape, dtype=dtype)
        mesh, placements, full = self._spread[name]
        return torch.distributed.tensor.empty(
            full, dtype=dtype, device_mesh=mesh, placements=placements
        )

    def describe(self, world: int) -> str:
        return f"for {world} replicas in {self._of} shards"

    def _join(self, name: str, held: Tensor) -> Tensor:
        """A rank's part as the DTensor it is part of."""
        if name not in self._spread:
            return held
        mesh, placements, full = self._spread[name]
        return DTensor.from_local(
            held.contiguous(),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(full),
            stride=contiguous_strides(full),
        )
