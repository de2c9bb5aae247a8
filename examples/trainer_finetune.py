"""Fine-tuning with the Transformers Trainer: compressed gradients, its own checkpoints, exact resume.

    torchrun --nproc-per-node 2 examples/trainer_finetune.py

A small BERT, made from its configuration, learns which of two words occurs more often in a sentence. In your own script it is
`from_pretrained`, and the sentences are real ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import thinwire as tw
from thinwire.integrations.transformers import compress

WORDS, LENGTH = 64, 24


class Sentences(Dataset[dict[str, Tensor]]):
    """Made from their number alone. Words 1 and 2 are the ones to count."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        counted = torch.rand(LENGTH, generator=generator) < 0.4
        words[counted] = torch.randint(1, 3, (int(counted.sum()),), generator=generator)
        label = (words == 1).sum() > (words == 2).sum()
        return {"input_ids": words, "labels": label.long()}


def make_model() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LENGTH,
        )
    )


def newest(folder: Path) -> str | None:
    """The last checkpoint that every process has finished: thinwire's files are the last to be written."""
    finished = [
        path
        for path in folder.glob("checkpoint-*")
        if (path / "thinwire_0.pt").exists() and (path / "thinwire_1.pt").exists()
    ]
    found = max(finished, key=lambda path: int(path.name.split("-")[1]), default=None)
    return None if found is None else str(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("runs/trainer_finetune"))
    options = parser.parse_args()

    set_seed(0)
    arguments = TrainingArguments(
        str(options.folder),
        max_steps=options.steps,
        save_steps=options.save_every,
        logging_steps=10,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        # The Trainer searches for unused parameters in every step unless it is told not to.
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(make_model(), arguments, train_dataset=Sentences(4096))

    # thinwire: the Trainer's AdamW learns well from everything in 4 bits, less well from the largest few.
    callback = compress(trainer, tw.Quantized(bits=4), deterministic=True)

    trainer.train(resume_from_checkpoint=newest(options.folder))
    if trainer.is_world_process_zero() and callback.handle is not None:
        weights = sum(p.double().abs().sum().item() for p in trainer.model.parameters())
        ratio = callback.handle.stats().ratio
        print(f"{ratio:.1f} times fewer bytes; sum of all weights {weights!r}", flush=True)
    if callback.handle is not None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
