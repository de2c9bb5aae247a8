"""Every method of the library once on real ranks: replicas stay bit-identical, also at an odd number of ranks."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.memory.momentum import MomentumCorrection
from thinwire.memory.residual import Residual
from thinwire.methods.chunktopk import ChunkTopK
from thinwire.methods.dgc import DGC
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.randomk import RandomK
from thinwire.methods.redsync import RedSync
from thinwire.methods.sidco import SIDCo
from thinwire.methods.signsgd import SignSGD
from thinwire.methods.threshold import Threshold

METHODS = (
    DGC(density=0.05, sample_ratio=0.01),
    GaussianK(density=0.05),
    RedSync(density=0.05),
    RedSync(density=0.05, trimmed=True),
    SIDCo(density=0.05, adapt=True),
    RandomK(density=0.05),
    RandomK(density=0.05, values="fp32"),
    Threshold(threshold=0.01, density=0.1),
    ChunkTopK(density=0.1, chunk=32, memory=MomentumCorrection(storage="int8")),
    SignSGD(),
    SignSGD(memory=Residual()),
    *(tw.Quantized(bits=bits) for bits in (16, 8, 4, 2, 1, "fp8")),
    tw.Quantized(bits=4, rounding="stochastic", memory=Residual(storage="bf16")),
)


def library_job(rank, world):
    prints = []
    for method in METHODS:
        ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        handle = tw.attach(ddp, method, optimizer=optimizer)
        train(ddp, optimizer, batches(rank, 5))
        stats = handle.stats()
        assert stats.steps == 5 and 0 < stats.wire_bytes < stats.dense_bytes
        assert all(p.isfinite().all() for p in ddp.parameters())
        handle.close()
        prints.append(fingerprint(ddp))
    return prints


def test_every_method_keeps_replicas_bit_identical(pools):
    ranks = pools(3).run(library_job)
    for which, method in enumerate(METHODS):
        assert len({prints[which] for prints in ranks}) == 1, method
