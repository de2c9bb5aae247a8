"""Script of a rank: train with tw.Auto() while the link slows down; say when, and print what was done in which step."""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

WIDTH, MOST_STEPS = 384, 150

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(
    nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), bucket_cap_mb=0.5
)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
handle = tw.attach(ddp, tw.Auto(measure_steps=4, trial_steps=2, window=4), optimizer=optimizer)
generator = torch.Generator().manual_seed(dist.get_rank())


def step() -> None:
    optimizer.zero_grad()
    ddp(torch.randn(2048, WIDTH, generator=generator)).square().mean().backward()
    optimizer.step()


pilot = handle.steering.pilot
assert pilot is not None
for _ in range(MOST_STEPS):
    step()
    if pilot.phase == "watching":
        break
print("first", *dict.fromkeys(pilot.labels), flush=True)
dist.barrier()
print("settled", flush=True)
for _ in range(MOST_STEPS):
    step()
    if pilot.phase == "watching" and set(pilot.labels) != {"dense"}:
        break
for _ in range(2):
    step()
bits = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
print("then", *dict.fromkeys(pilot.labels), flush=True)
print("steps", *(number for number, _ in pilot.history), flush=True)
print("weights", hashlib.sha256(bits).hexdigest(), flush=True)
for number, what in pilot.history:
    print(f"# {number}: {what}", flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)
