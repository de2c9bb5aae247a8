"""Script of a rank: a flat sparse exchange, then the same one between hosts only; print what left this host."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from thinwire.bench.exchange_cases import Worker, make_gradient, make_group
from thinwire.engine.drivers import run_inline
from thinwire.engine.network import Network
from thinwire.exchange.base import Exchange
from thinwire.exchange.hierarchy import Hierarchical
from thinwire.exchange.split import SplitReduce
from thinwire.lab import read_own_counters
from thinwire.methods.topk import TopK
from thinwire.observe.ledger import Ledger

NUMEL, STEPS = 1 << 18, 3
CPU = torch.device("cpu")

torch.set_num_threads(1)
dist.init_process_group("gloo")
assert dist.group.WORLD is not None
network = Network(dist.group.WORLD, Ledger(dist.get_world_size()))
network.add_hosts(int(os.environ["LOCAL_WORLD_SIZE"]))


def bytes_sent(exchange: Exchange) -> tuple[int, int]:
    """(payload that left this host's interface, bytes this rank's ledger has for requests that leave the host)."""
    network.ledger = Ledger(dist.get_world_size())
    method = TopK(density=0.1, values="fp32", exchange=exchange)
    worker = Worker(method, make_group(NUMEL, CPU), network.place)
    dist.barrier()
    before = read_own_counters()
    for step in range(STEPS):
        opened = worker.open(make_gradient(NUMEL, network.place.rank, step, CPU))
        run_inline(opened.program, network)
        assert opened.account is not None
        opened.account.settle(torch.tensor(False))
    dist.barrier()
    left = read_own_counters() - before
    rows = network.ledger.rows().items()
    return left.tx_payload, sum(row.sent_bytes for key, row in rows if "/inside/" not in key[0])


flat, hierarchical = bytes_sent(SplitReduce()), bytes_sent(Hierarchical(outer=SplitReduce()))
print(*flat, *hierarchical, flush=True)
sys.stdout.flush()
# gloo's threads can abort while the interpreter shuts down.
os._exit(0)
