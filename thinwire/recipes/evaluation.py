"""Evaluation: the task's own metrics over the whole test set, shared by the processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.recipes.device import place_batch
from thinwire.recipes.examples import Data
from thinwire.recipes.kinds import Carry
from thinwire.recipes.parallel import Workers
from thinwire.recipes.precision import Precision


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    workers: Workers,
    precision: Precision,
    batch_size: int,
    memory_format: torch.memory_format = torch.preserve_format,
) -> dict[str, float]:
    """Collective: every metric of the kind, each process having measured its share; sums are added in their order."""
    was_training = model.training
    model.eval()
    shares = data.test.deal_test(
        rank=workers.process, world=workers.processes, batch_size=batch_size
    )
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    carry: Carry = None
    for places in shares:
        batch = place_batch(data.test.batch(places, None), workers.device, memory_format)
        with precision.autocast():
            totals, carry = data.kind.measure(model, batch, carry)
        for name, (numerator, denominator) in totals.items():
            zero = torch.zeros((), dtype=torch.float64, device=workers.device)
            before, below = sums.get(name, (zero, zero))
            sums[name] = (before + numerator, below + denominator)
    model.train(was_training)
    mine = {name: (float(above), float(below)) for name, (above, below) in sums.items()}
    together: dict[str, tuple[float, float]] = {}
    for share in workers.gather(mine):
        for name, (above, below) in share.items():
            so_far = together.get(name, (0.0, 0.0))
            together[name] = (so_far[0] + above, so_far[1] + below)
    return data.kind.summarise(together)
