"""Step: what every worker learns from in one optimisation step, and how its loss is computed.

Everything random is a function of (seed, epoch, step, worker, micro-batch): a step can be repeated after a restart,
and workers that are simulated draw what real ones draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thinwire.recipes.device import place_batch
from thinwire.recipes.examples import Batch, Examples
from thinwire.recipes.kinds import Carry, Kind
from thinwire.recipes.precision import Precision


@dataclass(kw_only=True)
class Step:
    """One optimisation step of the workers that this process stands for."""

    kind: Kind
    examples: Examples
    places: Mapping[int, Sequence[Tensor]]
    """By worker: the places of each of its micro-batches; the same number of them for every worker."""
    carries: dict[int, Carry]
    """By worker: what a recurrent model starts from; `loss` puts there what the next micro-batch starts from."""
    precision: Precision
    device: torch.device
    memory_format: torch.memory_format
    """Of images."""
    seed: int
    epoch: int
    number: int
    """Of the step in its epoch, from 0."""
    losses: list[Tensor] = field(default_factory=list)
    """Of every micro-batch so far: detached, neither scaled nor divided."""

    @property
    def micro_batches(self) -> int:
        """Per worker."""
        return len(next(iter(self.places.values())))

    def batches(self, workers: Sequence[int], micro: int) -> list[Batch]:
        """A micro-batch of each of these workers, on the device."""
        found = self.examples.batches(
            [self.places[worker][micro] for worker in workers],
            [torch.Generator().manual_seed(self._draw("batch", w, micro)) for w in workers],
        )
        return [place_batch(batch, self.device, self.memory_format) for batch in found]

    def loss(self, model: nn.Module, worker: int, micro: int) -> Tensor:
        """Forward of one micro-batch of one worker: what to call backward() on, so that gradients add up to the step's.

        It is divided by the number of micro-batches and multiplied by the loss scale. A worker's micro-batches must come
        in order, because of the carry.
        """
        (batch,) = self.batches([worker], micro)
        self.seed_forward(worker, micro)
        with self.precision.autocast():
            loss, carry = self.kind.loss(model, batch, self.carries[worker])
        return self.finish(worker, loss, carry)

    def seed_forward(self, worker: int, micro: int) -> None:
        """Seed torch's global generators, from which dropout draws: the CPU's and the device's.

        `torch.manual_seed` also remembers the whole stack of calls for every kind of device that is not there.
        """
        seed = self._draw("forward", worker, micro)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def finish(self, worker: int, loss: Tensor, carry: Carry) -> Tensor:
        """Take note of a forward pass; returns its loss, divided and scaled."""
        self.carries[worker] = carry
        self.losses.append(loss.detach())
        return self.precision.scaler.scale(loss / self.micro_batches)

    def mean_loss(self) -> Tensor:
        """Over the micro-batches of all workers of this process, on the device."""
        return torch.stack(self.losses).double().mean()

    def _draw(self, purpose: str, worker: int, micro: int) -> int:
        text = f"{purpose} {self.seed} {self.epoch} {self.number} {worker} {micro}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
