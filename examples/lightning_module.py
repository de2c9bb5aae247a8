"""A Lightning module with compressed gradients: one callback, its own checkpoints, exact resume.

    torchrun --nproc-per-node 2 examples/lightning_module.py

`python examples/lightning_module.py` works too: Lightning then starts the second process itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.integrations.lightning import Compression


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def make_data(size: int) -> TensorDataset:
    """Which of eight groups of features has the largest sum."""
    inputs = torch.randn(size, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.view(size, 8, 8).sum(dim=2).argmax(dim=1))


class Report(pl.Callback):
    """A line every ten steps, for people without a progress bar."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *others: Any
    ) -> None:
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            print(f"step {trainer.global_step}: loss {outputs['loss'].item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning_module"))
    options = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    # Lightning's own resume is exact at the ends of epochs, so that is where this saves.
    keep = ModelCheckpoint(options.folder, filename="{epoch}", save_top_k=-1, save_last=True)
    # thinwire: this is all. Its state is in the checkpoints, its numbers are in the logs.
    compression = Compression(tw.ADTopK(density=0.01), deterministic=True)
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy="ddp",
        max_epochs=options.epochs,
        callbacks=[compression, keep, Report()],
        logger=CSVLogger(str(options.folder)),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    loader = DataLoader(make_data(1600), batch_size=32, shuffle=True)
    last = options.folder / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=str(last) if last.exists() else None)

    if trainer.is_global_zero and compression.handle is not None:
        weights = sum(p.double().abs().sum().item() for p in module.parameters())
        ratio = compression.handle.stats().ratio
        print(f"{ratio:.0f} times fewer bytes; sum of all weights {weights!r}", flush=True)
    if compression.handle is not None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
