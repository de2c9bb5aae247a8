"""A training script in ACP-SGD's documented style (init, DistributedOptimizer, loop); only its import line differs."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn, optim

import thinwire.horovod as acpsgd

acpsgd.init()
torch.set_num_threads(1)
torch.manual_seed(acpsgd.rank())
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = optim.SGD(model.parameters(), lr=0.5)
optimizer = acpsgd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), rank=4, threshold=25
)
generator = torch.Generator().manual_seed(acpsgd.rank())
data = torch.randn(256, 64, generator=generator)
target = data[:, :10].argmax(1)
losses = []
for _ in range(80):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
identical = bool((acpsgd.allgather(weights) == weights).all())
if acpsgd.rank() == 0:
    print(f"first {losses[0]:.3f} last {losses[-1]:.3f} identical {identical}")
acpsgd.barrier()
sys.stdout.flush()
os._exit(0)
