"""Script of a rank: all-reduce as many MB as the first argument says, print what came out."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from thinwire.lab import read_own_counters

dist.init_process_group("gloo")
values = torch.full((int(sys.argv[1]) * 1_000_000 // 4,), float(dist.get_rank() + 1))
before = read_own_counters()
dist.all_reduce(values)
# A rank has its sum while its own last bytes still wait in the socket; the barrier comes after them.
dist.barrier()
sent = read_own_counters() - before
print(f"sum {values[0].item():g} sent {sent.tx_payload}", flush=True)
# gloo's threads can abort while the interpreter shuts down.
os._exit(0)
