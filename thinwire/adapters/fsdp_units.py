"""Units: what FSDP2 reduces at a time, and where parameters lie in it.

Torch tells little of this in public. Everything private that the adapter reads of it is read in this file, and
`tests/adapters/test_fsdp_private.py` names it all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from thinwire.errors import UsageError
from thinwire.layout import (
    BucketLayout,
    ParameterInfo,
    Shard,
    canonical_name,
    contiguous_strides,
    kind_in_module,
    lay_out,
    local_part,
)


class Unit:
    """The parameters that FSDP reduces in one piece: one group of one module to which `fully_shard` was applied.

    What FSDP reduces is flat, in the reduce dtype: of every trainable parameter this rank's shard, padded to the size of
    the largest shard, one behind the other.
    """

    def __init__(self, module: FSDPModule, group: Any, names: dict[nn.Module, str]) -> None:
        self.module = module
        self._group = group
        self._trainable = self._find_trainable()
        self._members = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
        self.parameters = {self._name(one, names): one.sharded_param for one in self._members}
        self.infos = [
            self._describe(name, one)
            for name, one in zip(self.parameters, self._members, strict=True)
        ]
        for name, one in zip(self.parameters, self._members, strict=True):
            if one.offload_to_cpu:
                raise UsageError(
                    f"parameter {name!r} is offloaded to the CPU; offload_policy must be OffloadPolicy(), which is none"
                )
        self._layout: BucketLayout | None = None
        self._stepped: list[tuple[int, int]] | None = None

    def _find_trainable(self) -> list[bool]:
        return [one.sharded_param.requires_grad for one in self._group.fsdp_params]

    @staticmethod
    def _name(member: Any, names: dict[nn.Module, str]) -> str:
        """By its module, because a parameter that is gathered at the moment is another object there."""
        info = member._module_info
        return canonical_name(f"{names[info.module]}.{info.param_name}".lstrip("."))

    def _describe(self, name: str, member: Any) -> ParameterInfo:
        full, dim = tuple(member._orig_size), member.fsdp_placement.dim
        shape, padded = tuple(member.sharded_size), tuple(member.padded_sharded_param_size)
        rank = getattr(member.mesh_info, "shard_mesh_rank", 0)
        offset = min(rank * padded[dim], full[dim]) if full else 0
        padding = math.prod(padded) - math.prod(shape)
        cut = shape != full or padding > 0
        owner, local_name = member._module_info.module, member._module_info.param_name
        return ParameterInfo(
            name,
            shape,
            contiguous_strides(shape),
            self._reduce_dtype(member),
            kind_in_module(owner, local_name, member.sharded_param),
            type(owner),
            Shard(full, dim, offset, padding, shape[dim]) if cut else None,
        )

    @staticmethod
    def _reduce_dtype(member: Any) -> torch.dtype:
        policy = member.mp_policy
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or member.sharded_param.dtype
        return dtype

    # -- where it is -------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        device: torch.device = self._group.device
        return device

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards, where FSDP knows them."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    def stand_in(self, group: Any) -> None:
        """Have FSDP take `group` for those ranks."""
        # Units made by one call share what describes their mesh, and shards are described by it too.
        self._group.mesh_info = copy.copy(self._group.mesh_info)
        self._group.mesh_info.replicate_process_group = group

    def spread(self) -> Iterator[tuple[str, DeviceMesh, tuple[Placement, ...]]]:
        """Of every parameter that is spread over the ranks of one replica: its name, their mesh, how it is spread."""
        info = self._group.mesh_info
        for name, member in zip(self.parameters, self._members, strict=True):
            whole = member.sharded_param
            assert isinstance(whole, DTensor)
            mesh, placements = whole.device_mesh, list(whole.placements)
            if getattr(info, "replicate_mesh_dim", None) is not None:
                dims = list(mesh.mesh_dim_names or ())
                replicate = (info.mesh.mesh_dim_names or ("",))[info.replicate_mesh_dim]
                at = dims.index(replicate) if replicate in dims else info.replicate_mesh_dim
                if mesh.ndim == 1:
                    continue
                del placements[at], dims[at]
                mesh = mesh[tuple(dims)]
            yield name, mesh, tuple(placements)

    # -- one reduction -----------------------------------------------------------------------------------------

    def layout(self, flat: Tensor) -> BucketLayout:
        """Where the parameters lie in what FSDP reduces."""
        if self._layout is None or self._layout.dtype != flat.dtype:
            self._layout = lay_out(self.infos, flat.dtype, flat.device)
        if self._find_trainable() != self._trainable:
            raise UsageError(
                f"a parameter beside {self.infos[0].name!r} was frozen or thawed since attach; close the handle and "
                "attach again"
            )
        if flat.numel() != self._layout.numel:
            cure = (
                "call model.set_reduce_scatter_unused_params(True)"
                if hasattr(self.module, "set_reduce_scatter_unused_params")
                else "torch before 2.13 does not tell which, so every parameter has to be used in every backward"
            )
            raise UsageError(
                f"a parameter beside {self.infos[0].name!r} got no gradient in this backward; {cure}"
            )
        return self._layout

    def divides(self, flat: Tensor) -> bool:
        """Whether FSDP divides after the all-reduce; only where it has to sum, or fears an overflow."""
        narrow = flat.dtype not in (torch.float32, torch.bfloat16)
        return narrow or bool(self._group.force_sum_reduction_for_comms)

    def is_watched(self) -> bool:
        """Whether somebody reads gradients before backward ends, as an optimizer in backward does."""
        return any(
            getattr(one.sharded_param, "_post_accumulate_grad_hooks", None) for one in self._members
        )

    def hands_out(self, flat: Tensor) -> bool:
        """Whether gradients will be views of `flat` itself: nothing to cast to, nothing to add to."""
        return all(
            one.sharded_param.grad is None and one.sharded_param.dtype == flat.dtype
            for one in self._members
        )

    def gradients(self) -> list[Tensor | None]:
        """This rank's part of every gradient."""
        found = [one.sharded_param.grad for one in self._members]
        return [None if one is None else local_part(one) for one in found]

    def delivered(self) -> None:
        """Remember which gradients are complete now."""
        self._stepped = self._count_writes()

    def adds_up(self) -> bool:
        """Whether the next gradients are added to those that were delivered, with no step of an optimizer between."""
        held = all(gradient is not None for gradient in self.gradients())
        return held and self._stepped == self._count_writes()

    def _count_writes(self) -> list[tuple[int, int]]:
        """How often parameters were written to, as a whole or in this rank's part."""
        whole = [one.sharded_param for one in self._members]
        return [(one._version, local_part(one)._version) for one in whole]

    def probes(self) -> list[Tensor]:
        """One element of every gradient. Those of a bad step are all not-a-number."""
        held = [gradient for gradient in self.gradients() if gradient is not None]
        return [gradient.reshape(-1)[0].float() for gradient in held if gradient.numel()]


def find_units(model: nn.Module) -> list[Unit]:
    """All units of a model that have something to train."""
    names = {module: name for name, module in model.named_modules()}
    units: list[Unit] = []
    seen: set[int] = set()
    for module in names:
        if not isinstance(module, FSDPModule):
            continue
        groups = [Unit(module, one, names) for one in groups_of(module) if id(one) not in seen]
        seen.update(map(id, groups_of(module)))
        if len(groups) > 1 and any(unit.replicas is None for unit in groups):
            raise UsageError(
                f"module {names[module]!r} has parameters sharded over {len(groups)} meshes, and FSDP tells nobody which of "
                "them it has just summed; with 1-D meshes every module must have one"
            )
        units += groups
    return [unit for unit in units if unit.infos]


def groups_of(module: FSDPModule) -> list[Any]:
    """The groups of a module; torch 2.11 has one at most."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
