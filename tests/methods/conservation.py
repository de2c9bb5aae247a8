"""How much of a gradient a method loses, for the quick part in the tests and for the full grid.

python -m tests.methods.conservation benchmarks/conservation.csv
"""

from __future__ import annotations

import csv
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.contracts.cluster import Cluster, same_bits
from thinwire.errors import UsageError
from thinwire.exchange.all_gather import AllGather
from thinwire.memory.base import Memory
from thinwire.memory.momentum import MomentumCorrection
from thinwire.memory.residual import NoMemory, Residual
from thinwire.methods.adtopk import ADTopK
from thinwire.methods.base import SparseMethod
from thinwire.methods.chunktopk import ChunkTopK
from thinwire.methods.dgc import DGC
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.randomk import RandomK
from thinwire.methods.redsync import RedSync
from thinwire.methods.sidco import SIDCo
from thinwire.methods.threshold import Threshold
from thinwire.methods.topk import TopK
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

SHAPES = {"conv": (8, 4, 3, 3), "bias": (8,), "linear": (33, 40), "head": (10, 64)}
COMPRESSED = ("conv", "linear", "head")
METHODS: dict[str, SparseMethod] = {
    "topk": TopK(density=0.05),
    "adtopk": ADTopK(density=0.05),
    "dgc": DGC(density=0.05, sample_ratio=0.01),
    "gaussiank": GaussianK(density=0.05),
    "redsync": RedSync(density=0.05),
    "redsync trimmed": RedSync(density=0.05, trimmed=True),
    "sidco": SIDCo(density=0.05),
    "sidco adapt": SIDCo(density=0.05, distribution="gamma", stages=1, adapt=True),
    "randomk": RandomK(density=0.05),
    "randomk gathered": RandomK(density=0.05, exchange=AllGather()),
    "threshold": Threshold(threshold=1.5, density=0.2),
    "chunktopk": ChunkTopK(density=0.2, chunk=16),
    "chunktopk gathered": ChunkTopK(density=0.2, chunk=16, exchange=AllGather()),
}
MEMORIES: dict[str, Memory] = {
    "residual": Residual(),
    "momentum": MomentumCorrection(0.9, False),
    "none": NoMemory(),
    "residual bf16": Residual(storage="bf16"),
    "residual int8": Residual(storage="int8"),
    "momentum int8": MomentumCorrection(0.9, False, storage="int8"),
}


def worst_loss(method: SparseMethod, world: int = 3, steps: int = 2) -> float:
    """Largest |world x update + residuals - c| / |c| (L1, over ranks) of any tensor and step; replicas must agree.

    Without a memory: what was left behind afterwards, which must be 0.
    """
    cluster = Cluster(world, method, shapes=SHAPES)
    worst = 0.0
    for step in range(steps):
        before = [cluster.residuals(rank) for rank in range(world)]
        momenta = [
            {name: cluster.reducers[rank].assignments.held(name, "momentum") for name in COMPRESSED}
            for rank in range(world)
        ]
        gradients = cluster.random(step)
        updates = cluster.step(gradients)
        after = [cluster.residuals(rank) for rank in range(world)]
        for name in COMPRESSED:
            assert all(same_bits(update[name], updates[0][name]) for update in updates)
            held = sum(rest[name].double() for rest in after)
            c = torch.zeros_like(held)
            for rank in range(world):
                u = momenta[rank][name]
                c += before[rank][name] + gradients[rank][name]
                c += 0.9 * u if u is not None else 0.0
            lost = world * updates[0][name].double() + held - c
            if isinstance(method.memory, NoMemory):
                lost = held
            worst = max(worst, float(lost.abs().sum() / c.abs().sum()))
    return worst


def main(path: str) -> None:
    """Every method x memory x value code x index code, one row each."""
    rows = []
    for (name, method), (kind, memory), values, indices in itertools.product(
        METHODS.items(), MEMORIES.items(), VALUE_CODES, INDEX_CODES
    ):
        chosen = replace(
            method, memory=memory, values=values, indices=indices, dense_fallback=False
        )
        try:
            loss, refused = f"{worst_loss(chosen):.2e}", ""
        except UsageError as error:
            loss, refused = "", str(error)
        rows.append([name, kind, values, indices, loss, refused])
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "memory", "values", "indices", "relative_loss", "refused"])
        writer.writerows(rows)
    limit = max(float(r[4]) for r in rows if r[4] and r[1] in ("residual", "momentum"))
    print(f"{len(rows)} combinations, largest loss with float32 storage {limit:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
