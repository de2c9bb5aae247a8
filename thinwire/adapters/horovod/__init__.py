"""A Horovod face: `import thinwire.horovod as hvd` in a script written for Horovod's PyTorch API.

No MPI: ranks come from the environment that torchrun, SLURM launchers and `thinwire lab` set. `compression=` takes
`Compression.none`, `Compression.fp16`, `Compression.bf16` or any thinwire method.
"""

from typing import NoReturn

from thinwire.adapters.horovod.batch_norm import SyncBatchNorm
from thinwire.adapters.horovod.environment import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from thinwire.adapters.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from thinwire.adapters.horovod.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from thinwire.adapters.horovod.optimizer import DistributedOptimizer, join
from thinwire.adapters.horovod.reductions import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
)
from thinwire.errors import UsageError

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]

_GROUPS = "make a torch.distributed group and give it to tw.DistributedOptimizer(process_group=...)"
LEFT_OUT = {
    "ProcessSet": _GROUPS,
    "add_process_set": _GROUPS,
    "elastic": "start the script with torchrun --max-restarts; docs/frameworks.md has a recipe",
    "global_process_set": _GROUPS,
    "remove_process_set": _GROUPS,
    "run": "start the script with torchrun",
    "sparse_allreduce_async": "sparse-layout tensors cannot be sent",
    "start_timeline": "use torch.profiler",
    "stop_timeline": "use torch.profiler",
}
"""What Horovod has and this has not, with what to do instead."""


class LeftOutError(UsageError, AttributeError):
    """A name of Horovod's that is not covered; an AttributeError too, so that `hasattr` works."""


def __getattr__(name: str) -> NoReturn:
    if name in LEFT_OUT:
        raise LeftOutError(f"hvd.{name} is not covered by thinwire.horovod; {LEFT_OUT[name]}")
    raise AttributeError(f"module 'thinwire.horovod' has no attribute {name!r}")
