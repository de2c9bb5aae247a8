"""Who and where this process is, and what torch was built with."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def init() -> None:
    """Join the group that the launcher's environment describes; alone if there is none."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        store = dist.HashStore()
        dist.init_process_group(_backend(), store=store, rank=0, world_size=1)
        return
    if _backend() == "nccl":
        torch.cuda.set_device(local_rank())
    dist.init_process_group(_backend())


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", rank() if is_initialized() else 0))


def local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", size() if is_initialized() else 1))


def cross_rank() -> int:
    """The number of this rank's machine."""
    return int(os.environ.get("GROUP_RANK", rank() // local_size()))


def cross_size() -> int:
    """How many machines there are."""
    return int(os.environ.get("GROUP_WORLD_SIZE", -(-size() // local_size())))


def is_homogeneous() -> bool:
    """Whether all machines have as many ranks as this one."""
    return cross_size() * local_size() == size()


def nccl_built() -> bool:
    return dist.is_nccl_available()


def gloo_built() -> bool:
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    return dist.is_gloo_available()


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Never: ranks come from the launcher's environment."""
    return False


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    return False


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def _backend() -> str:
    # Horovod scripts pin one GPU per local process; with fewer GPUs than processes NCCL would refuse.
    return (
        "nccl"
        if torch.cuda.is_available() and torch.cuda.device_count() >= local_size()
        else "gloo"
    )
