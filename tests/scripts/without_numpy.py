"""Everything the library does on two ranks, on a machine with torch and without numpy.

Usage: python without_numpy.py
"""

# ruff: noqa: E402

import sys

# An import of it fails from now on, also torch's own.
sys.modules["numpy"] = None  # type: ignore[assignment]

import logging
import os
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
import thinwire.horovod as hvd

logging.getLogger("thinwire").setLevel(logging.ERROR)
hvd.init()
rank = dist.get_rank()
torch.set_num_threads(1)
METHODS = [
    tw.Dense(),
    tw.ADTopK(density=0.05),
    tw.DGC(density=0.05),
    tw.OkTopK(density=0.05),
    tw.SIDCo(density=0.05),
    tw.RandomK(density=0.05),
    tw.SignSGD(),
    tw.PowerSGD(rank=2),
    tw.ACPSGD(rank=2),
    tw.TopK(density=0.05, values="int8", indices="rice"),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


for method in METHODS:
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    handle = tw.attach(ddp, method, optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 64) + rank).square().mean().backward()
        optimizer.step()
    handle.load_state_dict(handle.state_dict())
    handle.stats(dimensions=True)
    str(handle.plan())
    handle.close()

try:
    tw.attach(DistributedDataParallel(make_model()), tw.TopK(density=0.1 + 0.1 * rank))
except tw.ExchangeError as error:
    assert "method differs between ranks: rank 0 has TopK(" in str(error)
else:
    raise AssertionError("settings that differ went unnoticed")

model = make_model()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
assert hvd.allgather_object(rank) == [0, 1]
hvd.barrier()
print("done without numpy", flush=True)
os._exit(0)
