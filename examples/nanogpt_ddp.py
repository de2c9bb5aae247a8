"""A small GPT on DistributedDataParallel, in the manner of nanoGPT: accumulation, clipping, a schedule, bf16 on a GPU.

    torchrun --nproc-per-node 2 examples/nanogpt_ddp.py

Its text is lines such as `27+48=75`, which it makes itself.
"""

from __future__ import annotations

import argparse
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

CHARACTERS = "0123456789+=\n"
BLOCK = 32


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(BLOCK, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.words(tokens) + self.places(places))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_batch(number: int, rank: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random places in endless lines of sums."""
    generator = torch.Generator().manual_seed(10_000 * number + rank)
    rows = []
    for _ in range(size):
        terms = torch.randint(50, (8, 2), generator=generator).tolist()
        text = "".join(f"{a:02d}+{b:02d}={a + b:02d}\n" for a, b in terms)
        start = int(torch.randint(9, (1,), generator=generator))
        rows.append([CHARACTERS.index(one) for one in text[start : start + BLOCK + 1]])
    tokens = torch.tensor(rows, device=device)
    return tokens[:, :-1], tokens[:, 1:]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up for a tenth of the steps, then follow a cosine to a tenth of the peak."""
    warm = max(1, steps // 10)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--bits", type=int, default=4)
    options = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    device, cast = torch.device("cpu"), nullcontext()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        cast = torch.autocast("cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(GPT().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)

    # thinwire: embeddings are left as they are; of everything else a few bits are sent.
    policy = [tw.rule(module=nn.Embedding, dense=True)]
    handle = tw.attach(ddp, tw.Quantized(bits=options.bits), policy=policy)
    if rank == 0:
        print(handle.plan(), flush=True)

    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, 3e-3)
        for micro in range(options.accumulate):
            batch = make_batch(step * options.accumulate + micro, rank, 16, device)
            # Nothing is sent before the last micro-batch.
            ddp.require_backward_grad_sync = micro == options.accumulate - 1
            with cast:
                loss = ddp(*batch) / options.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item() * options.accumulate:.4f}", flush=True)

    if rank == 0:
        print(f"{handle.stats().ratio:.1f} times fewer bytes", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
