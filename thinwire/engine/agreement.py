"""Agreement: what all ranks must have alike. Bytes are gathered as tensors: torch's object collectives need numpy."""

from __future__ import annotations

import ctypes
import hashlib
import json

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.engine.failures import failing_as
from thinwire.errors import ExchangeError


def agree(group: dist.ProcessGroup, settings: dict[str, str]) -> None:
    """Raise the same sentence on every rank if `settings` differ between ranks.

    Digests are compared first: the settings name every parameter, and there may be many ranks.
    """
    content = json.dumps(settings, sort_keys=True).encode()
    with failing_as(group, "settings"):
        if len(set(gather_bytes(group, hashlib.sha256(content).digest()))) == 1:
            return
        first, *others = [json.loads(one) for one in gather_bytes(group, content)]
    for rank, other in enumerate(others, start=1):
        for key in sorted({*first, *other}):
            if first.get(key) != other.get(key):
                raise ExchangeError(
                    f"{key} differs between ranks: rank 0 has {first.get(key, 'nothing')}, "
                    f"rank {rank} has {other.get(key, 'nothing')}; it must be the same on all ranks"
                )


def gather_bytes(group: dist.ProcessGroup, content: bytes) -> list[bytes]:
    """What every rank brings, in rank order; it may differ in length."""
    device = device_of(group)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = to_tensor(content.ljust(max(1, *lengths), b"\0")).to(device)
    pieces = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(pieces, padded, group=group)
    return [to_bytes(piece)[:length] for piece, length in zip(pieces, lengths, strict=True)]


def broadcast_bytes(group: dist.ProcessGroup, content: bytes, source: int) -> bytes:
    """What the rank `source` of the group brings; the others' content counts for nothing."""
    device = device_of(group)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if dist.get_rank(group) != source:
        content = bytes(int(size))
    values = to_tensor(content or b"\0").to(device)
    dist.broadcast(values, group=group, group_src=source)
    return to_bytes(values)[: int(size)]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group wants its tensors: the CPU if it can, else the current device of its kind."""
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def to_tensor(content: bytes) -> Tensor:
    """uint8 [len(content)], not empty."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def to_bytes(values: Tensor) -> bytes:
    values = values.cpu().contiguous()
    return ctypes.string_at(values.data_ptr(), values.numel())
