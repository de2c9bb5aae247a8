"""How many rows of each layer a global top-k leaves out while it trains, and an all-dimension top-k does not.

    python benchmarks/dimensions.py docs/dimensions.png

Trains the digits task in one process with tw.TopK at 1 % and looks at every fourth step.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
import thinwire.horovod as hvd
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.tasks import find_task
from thinwire.tools.plots import plot_dimensions

EPOCHS = 6
LOOK_EVERY = 4


def main(path: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    task = find_task("digits")
    data = task.load(DataOptions())
    training = task.training
    torch.manual_seed(training.seed)
    model = DistributedDataParallel(task.build(data.kind, False))
    handle = tw.attach(model, tw.TopK(density=0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)
    history = []
    for epoch in range(EPOCHS):
        dealt = data.train.deal(
            seed=training.seed, epoch=epoch, rank=0, world=1, batch_size=training.batch_size
        )
        for step, places in enumerate(dealt):
            optimizer.zero_grad()
            loss, _ = data.kind.loss(model, data.train.batch(places, None), None)
            loss.backward()
            if step % LOOK_EVERY == 0:
                history.append(handle.stats(dimensions=True).dimensions)
            optimizer.step()
    plot_dimensions(history, path)
    for name, last in history[-1].items():
        shares = [stats[name].empty_global / stats[name].rows for stats in history]
        print(
            f"{name:24} {last.rows:5} rows, left out by global top-k: {sum(shares) / len(shares):.0%}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
