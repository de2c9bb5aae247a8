"""The variables each rank starts with: rendezvous, interfaces, NCCL's idea of a host, GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.lab.topology import INTERFACE, Rank, Topology


def rank_environment(
    topology: Topology,
    rank: Rank,
    master_port: int,
    gpus: Sequence[str] = (),
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of one rank: `base` (this process's own by default) and the lab's.

    The lab's variables win, except for the two that only tune (OMP_NUM_THREADS, PYTHONUNBUFFERED).
    """
    spec = topology.spec
    inherited = dict(os.environ if base is None else base)
    tuning = {
        # All ranks share this machine's processors; torch would give each of them all.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // spec.world_size)),
        # Output passes through a pipe; a killed rank must not take its last lines with it.
        "PYTHONUNBUFFERED": "1",
    }
    placement = {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_host),
        "GROUP_RANK": str(rank.host.index),
        "GROUP_WORLD_SIZE": str(spec.hosts),
        "MASTER_ADDR": topology.hosts[0].address,
        "MASTER_PORT": str(master_port),
    }
    transport = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": nccl_host_id(topology, rank),
        # InfiniBand and vendor plug-ins would go around the shaped links.
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
    }
    visible = gpus_of_host(gpus, topology, rank.host.index)
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {}
    return {**tuning, **inherited, **placement, **transport, **devices}


def nccl_host_id(topology: Topology, rank: Rank) -> str:
    """Return what NCCL takes for the identity of the machine.

    Ranks with the same identity talk through shared memory and must not share a GPU. With
    `share_gpu` each rank has its own identity, and all traffic is TCP.
    """
    host = rank.host.namespace
    return f"{host}-{rank.local_rank}" if topology.spec.share_gpu else host


def visible_gpus(base: Mapping[str, str] | None = None) -> list[str]:
    """Return the GPUs of this machine as CUDA_VISIBLE_DEVICES names them."""
    chosen = (os.environ if base is None else base).get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    devices = [path.name for path in Path("/dev").glob("nvidia*")]
    return [str(index) for index in range(sum(map(_is_gpu, devices)))]


def gpus_of_host(gpus: Sequence[str], topology: Topology, host: int) -> list[str]:
    """Deal the GPUs out to the ranks in turn and return those of one host, each once.

    With one GPU (or none) there is nothing to deal and every host sees the machine as it is.
    """
    if len(gpus) < 2:
        return []
    per_host = topology.spec.ranks_per_host
    first = host * per_host
    dealt = [gpus[rank % len(gpus)] for rank in range(first, first + per_host)]
    return list(dict.fromkeys(dealt))


def _is_gpu(device: str) -> bool:
    return re.fullmatch(r"nvidia\d+", device) is not None
