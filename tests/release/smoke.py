"""Trains on two gloo ranks with what is installed: attach, ten steps, save, load, ten more. It needs torch and thinwire, and nothing else.

python smoke.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

RANKS = 2
STEPS = 10


def train(rank: int, store: str) -> None:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    handle = tw.attach(ddp, tw.ADTopK(density=0.05), optimizer=optimizer)
    data = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))

    def run(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (ddp(data).squeeze() - data[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    first = run(STEPS)
    saved = Path(store).with_name(f"checkpoint{rank}.pt")
    torch.save({"model": model.state_dict(), "thinwire": handle.state_dict()}, saved)
    there = run(STEPS)
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    handle.load_state_dict(state["thinwire"])
    again = run(STEPS)
    assert there == again, "a run that was loaded did not go on as the one that was saved"
    assert again[-1] < first[0], "it did not learn"
    stats = handle.stats()
    assert stats.ratio > 2, f"the ratio is {stats.ratio}"
    print(
        f"rank {rank}: loss {first[0]:.3f} to {again[-1]:.3f}, {stats.ratio:.1f} times fewer bytes"
    )
    dist.barrier()
    sys.stdout.flush()
    # Gloo's threads can abort in Python's shutdown.
    os._exit(0)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(rank), store], env=environment)
            for rank in range(RANKS)
        ]
        return max(abs(process.wait()) for process in ranks)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2])
    sys.exit(main())
