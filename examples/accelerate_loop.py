"""A training loop with Accelerate: compressed gradients, `save_state`, `load_state`, exact resume.

    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

The pictures are bars of four directions in noise; the script makes them itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.integrations.accelerate import compress


def make_pictures(size: int) -> TensorDataset:
    """[size, 1, 16, 16] and which of four directions each shows."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (size,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    lines = torch.stack([rows, columns, rows + columns, rows - columns])
    shift = torch.randint(4, (size, 1, 1), generator=generator)
    bars = ((lines[labels] + shift) % 4 < 2).float()
    pictures = bars + torch.randn(bars.shape, generator=generator)
    return TensorDataset(pictures.unsqueeze(1), labels)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, stride=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(128),
        nn.ReLU(),
        nn.Linear(128, 4),
    )


def newest(folder: Path) -> Path | None:
    """The last checkpoint that every process has finished."""
    finished = [path.parent for path in folder.glob("step-*/finished")]
    return max(finished, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate_loop"))
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    model = make_model()
    model(torch.zeros(1, 1, 16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(make_pictures(2048), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # thinwire: what it holds back is saved and loaded by the accelerator from now on.
    handle = compress(accelerator, model, tw.ADTopK(density=0.01), deterministic=True)

    step = 0
    checkpoint = newest(options.folder)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        step = int(checkpoint.name.removeprefix("step-"))
    while step < options.steps:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for inputs, labels in accelerator.skip_first_batches(loader, done):
            train(accelerator, model, optimizer, inputs, labels, step)
            step += 1
            if step % options.save_every == 0:
                folder = options.folder / f"step-{step}"
                accelerator.save_state(str(folder))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (folder / "finished").touch()
                    # thinwire: in your own script `accelerator.log` sends these to its trackers.
                    handle.log(lambda values, step: print(f"step {step}: {values}"), step)
            if step == options.steps:
                break

    weights = sum(p.double().abs().sum().item() for p in model.parameters())
    ratio = handle.stats().ratio
    accelerator.print(f"{ratio:.0f} times fewer bytes; sum of all weights {weights!r}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    step: int,
) -> None:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 10 == 0:
        accelerator.print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
