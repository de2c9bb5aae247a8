"""A byte-level GPT on text files, trained by simulated workers: one cell of the studies of Adam and of local steps.

Everything that differs between cells is in `Cell`; data, batches and the start of the weights depend on the seed alone.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learning.byte_cells import LOCAL, Cell
from learning.byte_jobs import CommonSteps, Job, LocalWorkers

WARM_UP = 100
LAST_RATE = 0.1
"""Of the learning rate at the end of the cosine, as a share."""
TESTS = 10
"""In a run."""
TEST_WINDOWS = 320
TEST_BATCH = 80


def read_bytes(folder: Path, part: str, device: torch.device) -> Tensor:
    """All of `folder`'s wikitext file of that part (train, valid), below any folder."""
    found = sorted(
        path for path in folder.rglob(f"*{part}*") if path.is_file() and "wiki" in str(path).lower()
    )
    if not found:
        raise FileNotFoundError(f"there is no wikitext file named *{part}* below {folder}")
    content = bytearray(found[0].read_bytes())
    return torch.frombuffer(content, dtype=torch.uint8).long().to(device)


def draw_windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """[count, context + 1] bytes from random places."""
    begins = torch.randint(len(text) - context - 1, (count,), generator=generator)
    return text[begins.to(text.device)[:, None] + torch.arange(context + 1, device=text.device)]


class Training:
    """One cell at work; it can be put aside and taken up again."""

    def __init__(
        self, cell: Cell, folder: Path, device: str, test_windows: int = TEST_WINDOWS
    ) -> None:
        self.cell = cell
        self.test_windows = test_windows
        self.device = torch.device(device)
        self.train = read_bytes(folder, "train", self.device)
        self.valid = read_bytes(folder, "valid", self.device)
        torch.manual_seed(10 * cell.seed)
        make = LocalWorkers if cell.method in LOCAL else CommonSteps
        self.job: Job = make(cell, self.device)
        self.generator = torch.Generator().manual_seed(10 * cell.seed + 1)
        self.step = 0
        self.curve: list[float] = []
        self.train_curve: list[float] = []
        """Of bytes that were trained on, with as many batches."""
        self.seconds = 0.0
        self.dense_bytes = 0
        """Sent when the dense start ended."""

    def rate(self) -> float:
        cell, step = self.cell, self.step
        cosine = 0.5 * (1 + math.cos(math.pi * step / cell.steps))
        warm = min(1.0, (step + 1) / min(WARM_UP, max(1, cell.steps // 10)))
        return cell.lr * warm * (LAST_RATE + (1 - LAST_RATE) * cosine)

    def run(self, until: float, stop: int | None = None) -> bool:
        """Train until the end, until the clock says so, or before the step `stop`; whether it is done."""
        began = time.monotonic()
        last = self.cell.steps if stop is None else stop
        while self.step < last and time.monotonic() < until:
            workers, batch, context = self.cell.workers, self.cell.batch, self.cell.context
            windows = draw_windows(self.train, workers * batch, context, self.generator)
            self.job.step(windows.view(workers, batch, -1), self.rate())
            self.step += 1
            if self.step == self.half:
                self.dense_bytes = self.job.sent_bytes()
            if self.step % max(1, self.cell.steps // TESTS) == 0:
                self.curve.append(self.test(self.valid))
                self.train_curve.append(self.test(self.train))
        self.seconds += time.monotonic() - began
        return self.step >= self.cell.steps

    @property
    def half(self) -> int:
        """From here on bytes are counted: every dense start has ended."""
        return self.cell.steps // 2

    @torch.no_grad()
    def test(self, text: Tensor) -> float:
        """Nats per byte of a text, the same windows always."""
        generator = torch.Generator().manual_seed(7)
        windows = draw_windows(text, self.test_windows, self.cell.context, generator)
        parts = windows.split(TEST_BATCH)
        losses = [self.job.model(part[:, :-1], part[:, 1:]) * len(part) for part in parts]
        return float(torch.stack(losses).sum()) / self.test_windows

    def row(self) -> dict[str, Any]:
        sent = self.job.sent_bytes() - self.dense_bytes
        parameters = sum(p.numel() for p in self.job.model.parameters())
        world = self.cell.workers
        counted = self.cell.steps - self.half
        return {
            **asdict(self.cell),
            "key": self.cell.key,
            "parameters": parameters,
            "valid_loss": self.curve[-1],
            "best_valid_loss": min(self.curve),
            "train_loss": self.train_curve[-1],
            "curve": [round(loss, 4) for loss in self.curve],
            "passes": self.cell.steps
            * world
            * self.cell.batch
            * self.cell.context
            / len(self.train),
            # As many bits per parameter and step as an all-reduce with the same traffic would have.
            "bits": sent * 8 / counted / parameters / (2 * (world - 1) / world),
            "memory_bytes": self.job.memory_bytes(),
            "seconds": round(self.seconds, 1),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }

    def save(self, path: Path) -> None:
        state = {
            "job": self.job.state_dict(),
            "generator": self.generator.get_state(),
            "numbers": (self.step, self.curve, self.train_curve, self.seconds),
            "sent": self.job.sent_bytes() - self.dense_bytes,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.job.load_state_dict(state["job"])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.curve, self.train_curve, self.seconds = state["numbers"]
        if self.step >= self.half:
            self.dense_bytes = -state["sent"]
