"""FSDP2 in the manner of torchtitan: sharded inside a node, copied between nodes, compressed between the copies.

    torchrun --nproc-per-node 4 examples/hsdp_loop.py   # 2 copies of 2 shards
    torchrun --nproc-per-node 2 examples/hsdp_loop.py   # 2 copies of 1

Inside a node the link is fast, and reduce-scatter and all-gather stay as they are. Between nodes it is slow: only that
all-reduce is compressed. The text is lines of sums, which the script makes itself.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw

CHARACTERS = "0123456789+=\n"
LENGTH, WIDTH, LAYERS = 32, 128, 2


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def make_batch(step: int, rank: int, device: torch.device) -> Tensor:
    """[16, LENGTH + 1], from the step and the rank alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    terms = torch.randint(50, (16, 8, 2), generator=generator).tolist()
    texts = ["".join(f"{a:02d}+{b:02d}={a + b:02d}\n" for a, b in row) for row in terms]
    rows = [[CHARACTERS.index(one) for one in text[: LENGTH + 1]] for text in texts]
    return torch.tensor(rows, device=device)


class Progress:
    """What a distributed checkpoint holds of model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = int(state["step"])


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint: `.metadata` is the last file to be written."""
    finished = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(finished, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--shards", type=int, help="half of the processes unless given")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("runs/hsdp_loop"))
    options = parser.parse_args()

    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    shards = options.shards or max(1, world // 2)
    mesh = init_device_mesh(
        device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    model = Language().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # thinwire: what travels between the copies of a shard; the largest 5 % of it here.
    handle = tw.attach(model, tw.ADTopK(density=0.05), deterministic=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    progress = Progress(model, optimizer)
    checkpoint = newest(options.folder)
    dist.barrier()
    if checkpoint is not None:
        dcp.load({"training": progress, "thinwire": handle}, checkpoint_id=str(checkpoint))
    while progress.step < options.steps:
        batch = make_batch(progress.step, rank, device)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if rank == 0 and progress.step % 10 == 0:
            print(f"step {progress.step}: loss {loss.item():.4f}", flush=True)
        if progress.step % options.save_every == 0:
            target = options.folder / f"step-{progress.step}"
            dcp.save({"training": progress, "thinwire": handle}, checkpoint_id=str(target))

    weights = sum(p.full_tensor().double().abs().sum().item() for p in model.parameters())
    if rank == 0:
        ratio = handle.stats().ratio
        print(f"{ratio:.1f} times fewer bytes; sum of all weights {weights!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
