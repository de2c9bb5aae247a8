"""The FSDP adapter on a GPU: 2 replicas x 2 shards, streams and buffers as they are with NCCL.

    thinwire lab --hosts 2 --ranks-per-host 2 --rate 10gbit --share-gpu --mps -- python -m tests.gpu.hsdp --out verdicts.json
    torchrun --nproc-per-node 4 -m tests.gpu.hsdp --device cpu adtopk

For every method:

replicas    the ranks that hold the same shards hold the same bits after every step, in fp32 and with narrow gradients
aliasing    what is sent whole is what plain training has, over many layers whose buffers could be reused too early, while
            a slow kernel holds thinwire's streams back
host waits  under `torch.cuda.set_sync_debug_mode("error")` steps do not make the host wait
accelerate  what Accelerate shards by FSDP2 keeps its replicas, and goes on from a saved state as if nothing had happened
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire as tw
from tests.gpu.seats import Check, Seat, Skip, make_method, run_script

LAYERS, WIDTH, STEPS, WARMUP = 8, 256, 6, 4
SLEEP_CYCLES = 2_000_000
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
METHODS = ("dense", "topk", "adtopk", "oktopk", "powersgd", "acpsgd")

_meshes: dict[str, DeviceMesh] = {}


def mesh_of(seat: Seat) -> DeviceMesh:
    if seat.world % 2:
        raise Skip("it takes an even number of ranks")
    if seat.device.type not in _meshes:
        _meshes[seat.device.type] = init_device_mesh(
            seat.device.type, (seat.world // 2, 2), mesh_dim_names=("replicate", "shard")
        )
    return _meshes[seat.device.type]


def make_model(seat: Seat, policy: MixedPrecisionPolicy) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(seat.device)
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh_of(seat), mp_policy=policy)
    fully_shard(model, mesh=mesh_of(seat), mp_policy=policy)
    return model


def make_data(seat: Seat, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seat.rank)
    return [
        (
            torch.randn(16, WIDTH, generator=generator).to(seat.device),
            torch.randint(10, (16,), generator=generator).to(seat.device),
        )
        for _ in range(steps)
    ]


def step(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]).float(), batch[1]).backward()
    optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().to_local().flatten() for p in model.parameters()])  # type: ignore[attr-defined]


def check_replicas(seat: Seat, name: str) -> None:
    group = mesh_of(seat).get_group("replicate")
    for policy in (MixedPrecisionPolicy(), NARROW):
        model = make_model(seat, policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = tw.attach(model, make_method(name))
        for batch in make_data(seat, STEPS):
            step(model, optimizer, batch)
            mine = weights(model)
            others = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(others, mine, group=group)
            assert all(torch.equal(mine, other) for other in others)
            assert mine.isfinite().all()
        handle.close()


def check_aliasing(seat: Seat, name: str) -> str:
    """All units are in flight at once; each must get its own mean, whatever the allocator does meanwhile."""
    if name != "dense":
        raise Skip("only what sends everything can be compared with plain training")
    found = []
    for policy in (MixedPrecisionPolicy(), NARROW):
        for attached in (False, True):
            model = make_model(seat, policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            handle = tw.attach(model, tw.Dense()) if attached else None
            if handle is not None and seat.device.type == "cuda":
                hold_back(handle)
            for batch in make_data(seat, STEPS):
                step(model, optimizer, batch)
            found.append(weights(model).clone())
            if handle is not None:
                handle.close()
    for plain, ours in (found[:2], found[2:]):
        difference = float((plain - ours).abs().max())
        assert difference <= 1e-6, difference
    return f"differs by {difference:g}"


def hold_back(handle: tw.Handle) -> None:
    """Let a kernel that only waits go before every encoding, so that exchanges end long after FSDP has gone on."""
    reducer = handle.reducer
    plain = reducer._reduce

    def slow(*arguments: Any) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        plain(*arguments)

    reducer._reduce = slow  # type: ignore[method-assign]


def check_host_waits(seat: Seat, name: str) -> str:
    method = make_method(name)
    if not method.host_sync_free:
        raise Skip("it does not promise to be free of host waits")
    model = make_model(seat, MixedPrecisionPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tw.attach(model, method)
    data = make_data(seat, WARMUP + STEPS)
    seat.wait()
    for number, batch in enumerate(data):
        if number == WARMUP and seat.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        step(model, optimizer, batch)
    if seat.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert weights(model).isfinite().all()
    handle.close()
    return f"{STEPS} steps after {WARMUP}"


@functools.cache
def make_accelerator(replicas: int) -> Any:
    """Made once per process: Accelerate keeps its state for good."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    # All ranks share a GPU, and Accelerate takes the one of this number.
    os.environ["LOCAL_RANK"] = "0"
    return Accelerator(
        parallelism_config=ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )


def check_accelerate(seat: Seat, name: str) -> str:
    if seat.device.type != "cuda":
        raise Skip("Accelerate shards models on accelerators only")
    try:
        return resume_under_accelerate(seat, name)
    except ImportError as error:
        raise Skip(f"Accelerate is not installed: {error}") from None


def resume_under_accelerate(seat: Seat, name: str) -> str:
    accelerator = make_accelerator(seat.world // 2)
    from thinwire.integrations.accelerate import compress

    data = make_data(seat, 2 * STEPS)
    folder = Path(tempfile.gettempdir(), f"thinwire-accelerate-{name}")
    found = []
    for saved in (False, True):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        )
        handle = compress(accelerator, model, make_method(name), optimizer=optimizer)
        if saved:
            accelerator.load_state(str(folder))
        for number, batch in enumerate(data[STEPS:] if saved else data):
            if not saved and number == STEPS:
                accelerator.save_state(str(folder), safe_serialization=False)
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
            optimizer.step()
        handle.close()
        found.append(weights(model).clone())
        accelerator.free_memory()
    group = accelerator.torch_device_mesh["dp_replicate"].get_group()
    others = [torch.empty_like(found[0]) for _ in range(group.size())]
    dist.all_gather(others, found[0], group=group)
    assert all(torch.equal(found[0], other) for other in others)
    difference = float((found[0] - found[1]).abs().max())
    assert difference <= 1e-6, difference
    return f"resumed, differs by {difference:g}"


CHECKS: dict[str, Check] = {
    "replicas": check_replicas,
    "aliasing": check_aliasing,
    "host waits": check_host_waits,
    "accelerate": check_accelerate,
}

if __name__ == "__main__":
    run_script("Sharded models on NCCL, for some methods.", CHECKS, list(METHODS))
