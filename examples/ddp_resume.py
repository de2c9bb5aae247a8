"""DistributedDataParallel with compressed gradients, checkpoints and exact resume.

    torchrun --nproc-per-node 2 examples/ddp_resume.py

Kill it and start it again: it goes on from its last checkpoint and ends with the same weights, to the last bit. What is
thinwire's is marked; the rest is any DDP script.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

FEATURES, CLASSES, BATCH = 64, 10, 32


def make_batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Made from the step and the rank alone, so that a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    labels = inputs.view(BATCH, 8, 8).sum(dim=2).argmax(dim=1)
    return inputs.to(device), labels.to(device)


def save(
    folder: Path, step: int, ddp: nn.Module, optimizer: torch.optim.Optimizer, handle: tw.Handle
) -> None:
    """One file per rank, because what is held back differs between ranks; `latest` is moved when all are written."""
    target = folder / f"step-{step}"
    target.mkdir(parents=True, exist_ok=True)
    content = {
        "step": step,
        "model": ddp.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "thinwire": handle.state_dict(),  # thinwire: what this rank holds back
    }
    torch.save(content, target / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(target.name)
        (folder / "latest.new").replace(folder / "latest")


def load(folder: Path, ddp: nn.Module, optimizer: torch.optim.Optimizer, handle: tw.Handle) -> int:
    """The step to go on from: 0 if nothing was saved."""
    if not (folder / "latest").exists():
        return 0
    path = folder / (folder / "latest").read_text() / f"rank{dist.get_rank()}.pt"
    content = torch.load(path, weights_only=True, map_location="cpu")
    ddp.module.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    handle.load_state_dict(content["thinwire"])  # thinwire
    return content["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("runs/ddp_resume"))
    options = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, CLASSES)).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    # thinwire: 1 % of the gradients; deterministic=True makes resuming exact to the last bit.
    handle = tw.attach(ddp, tw.ADTopK(density=0.01), deterministic=True)

    start = load(options.folder, ddp, optimizer, handle)
    for step in range(start, options.steps):
        inputs, labels = make_batch(step, rank, device)
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
        if (step + 1) % options.save_every == 0:
            save(options.folder, step + 1, ddp, optimizer, handle)

    if rank == 0:
        weights = sum(p.double().abs().sum().item() for p in ddp.parameters())
        print(
            f"{handle.stats().ratio:.0f} times fewer bytes; sum of all weights {weights!r}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
