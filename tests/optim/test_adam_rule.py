"""One and four bits in Adam's scale, three workers: AdamScale against its rule, written down once more in plain torch.

Every worker   u = beta1 u + (1 - beta1) g;  c = residual + u;  sends q = code(c / d), cut at the limit;  keeps c - q d
Every owner    sums q over the workers of its blocks, its own c / d cut but not coded;  sends code(sum), cut at workers x limit;
               keeps (sum - code) d as well
Everybody      w = w - lr decay w - lr / (1 - beta1^t) x mean;   d = sqrt(v) + eps

and every few steps, the first time so many after the dense start, v learns from the mean gradient in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.methods.quantized_reference import owners, quantise_block
from tests.optim.adam_job import (
    SETTINGS,
    START,
    WORKERS,
    check_close,
    in_scale,
    refreshed,
    start,
    train,
    train_by_rule,
)

BETA1, EPS = SETTINGS["betas"][0], SETTINGS["eps"]
EVERY = 3
BLOCK = 32
STEPS = START + 3 * EVERY


def code(values: Tensor, bits: int, limit: float) -> Tensor:
    """What a block becomes. Of one bit the result is cut, of more what is coded."""
    if bits == 1:
        sent = quantise_block(values, 1)
        most = torch.tensor(limit).view(torch.int32) & -65536
        return sent.clamp(-most.view(torch.float32), most.view(torch.float32))
    return quantise_block(values.clamp(-limit, limit), bits)


def mean_in_8_bits(name: str, gradients: list[Tensor]) -> Tensor:
    """As owners find it who keep their own part as it is, in blocks of 128; nobody holds anything back."""
    parts = [g.flatten().split(128) for g in gradients]
    found = []
    for block, owner in enumerate(owners(name, len(parts[0]), WORKERS)):
        sent = [
            part[block] if rank == owner else quantise_block(part[block], 8)
            for rank, part in enumerate(parts)
        ]
        found.append(quantise_block(sum(sent), 8) / WORKERS)
    return torch.cat(found).view(gradients[0].shape)


@dataclass
class Compressed:
    """One parameter behind the dense start."""

    name: str
    v: Tensor
    u: list[Tensor]
    bits: int
    sum_bits: int
    limit: float

    def __post_init__(self) -> None:
        self.residuals = [torch.zeros_like(self.v)] * WORKERS
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> Tensor:
        """The mean of what was sent, in units of the divisor."""
        self.steps += 1
        if self.steps % EVERY == 0:
            mean = mean_in_8_bits(self.name, gradients)
            self.v = refreshed(self.v, mean, EVERY, self.steps // EVERY - 1)
        d = self.v.sqrt() + EPS
        self.u = [BETA1 * u + (1 - BETA1) * g for u, g in zip(self.u, gradients, strict=True)]
        c = [residual + u for residual, u in zip(self.residuals, self.u, strict=True)]
        mean, kept = self.exchange([one / d for one in c])
        self.residuals = [one * d for one in kept]
        return mean

    def exchange(self, in_units: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(the mean, what every worker keeps), block by block."""
        parts = [one.flatten().split(BLOCK) for one in in_units]
        mean, kept = [], [[] for _ in range(WORKERS)]
        for block, owner in enumerate(owners(self.name, len(parts[0]), WORKERS)):
            given = [part[block] for part in parts]
            sent = [code(one, self.bits, self.limit) for one in given]
            # What is left of coarse sums is too much for the limit of one worker's part.
            coarse = self.sum_bits <= self.bits
            sent[owner] = given[owner] if coarse else given[owner].clamp(-self.limit, self.limit)
            total = sum(sent)
            final = code(total, self.sum_bits, WORKERS * self.limit)
            for rank in range(WORKERS):
                kept[rank].append(given[rank] - sent[rank])
            kept[owner][-1] = kept[owner][-1] + total - final
            mean.append(final / WORKERS)
        shape = in_units[0].shape
        return torch.cat(mean).view(shape), [torch.cat(one).view(shape) for one in kept]


@pytest.mark.parametrize("limit", [0.7, 3.0])
@pytest.mark.parametrize(("bits", "sum_bits"), [(1, 1), (1, 4), (1, 8), (2, 4), (4, 4)])
def test_three_workers_follow_the_rule(bits: int, sum_bits: int, limit: float) -> None:
    """To a thousandth of a step, in every step: a refresh or a part that is treated in another way shows at once."""
    method = tw.Quantized(bits=bits, sum_bits=sum_bits, block=BLOCK, dense_fallback=False)
    divisor = tw.memory.Refresh(every=EVERY)
    model, optimizer, simulation = start(in_scale(method, divisor=divisor, limit=limit))
    ours = train(optimizer, simulation, model, range(STEPS))

    def take_over(name: str, v: Tensor, u: Tensor) -> Compressed:
        return Compressed(name, v, [u] * WORKERS, bits, sum_bits, limit)

    check_close(ours, train_by_rule(STEPS, take_over), 1e-3)
