"""How much low-rank methods hold back: their references, fed with the real gradients of ResNet-20 on CIFAR-10.

    python benchmarks/held_back.py --data-dir ~/data

Four workers of 32 images compute gradients along dense training; from the 21st step on each method compresses them, with its
residual, without any influence on the training. Printed per layer, over the last 40 of 100 such steps: the norm of the mean residual
and of the update, both relative to the mean gradient's, and the cosine between update and gradient. Methods that follow each
other send as many numbers: PowerSGD of rank r as ACP-SGD of rank 2 r.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from thinwire.lowrank.reference import AlternatingReference, TwoPhaseReference  # noqa: E402
from thinwire.recipes.data.pixels import Pixels  # noqa: E402
from thinwire.recipes.job import build_job  # noqa: E402

WORKERS, IMAGES = 4, 32
IGNORED, WATCHED, SHOWN = 20, 100, 40
LAYERS = ("stages.1.conv1.weight", "stages.4.conv2.weight", "stages.8.conv1.weight")
METHODS = (("PowerSGD", 2), ("ACP-SGD", 4), ("PowerSGD", 4), ("ACP-SGD", 8))


@dataclass
class Watch:
    """One method on one layer."""

    name: str
    rank: int
    shape: tuple[int, int]
    seen: list[tuple[float, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        rows, columns = self.shape
        p = torch.randn(rows, self.rank, generator=generator)
        q = torch.randn(columns, self.rank, generator=generator)
        self.alternating = AlternatingReference(p, q, WORKERS, self.shape)
        self.two_phase = TwoPhaseReference(q, WORKERS, self.shape)

    def step(self, gradients: Sequence[Tensor]) -> None:
        matrices = [gradient.reshape(self.shape) for gradient in gradients]
        if self.name == "ACP-SGD":
            update = self.alternating.step(matrices, "pq"[len(self.seen) % 2])
            residuals = self.alternating.residuals
        else:
            update = self.two_phase.step(matrices)
            residuals = self.two_phase.residuals
        mean = torch.stack(matrices).mean(0)
        held, size = torch.stack(residuals).mean(0).norm(), mean.norm()
        cosine = F.cosine_similarity(update.flatten(), mean.flatten(), 0)
        self.seen.append((float(held / size), float(update.norm() / size), float(cosine)))

    def line(self, layer: str) -> str:
        held, sent, cosine = torch.tensor(self.seen[-SHOWN:]).mean(0).tolist()
        return f"{layer:24s}{self.name:9s}{self.rank:5d}{held:10.2f}{sent:8.2f}{cosine:8.2f}"


def watch_training(data_dir: Path) -> dict[str, list[Watch]]:
    settings = {
        "task": {"name": "cifar10-resnet20", "data_dir": str(data_dir)},
        "method": {"name": "dense"},
    }
    job = build_job("train", settings, out=Path())
    task = job.choice.find()
    data = task.load(job.source)
    assert isinstance(data.train, Pixels)
    torch.manual_seed(0)
    model: nn.Module = task.build(data.kind, False)
    parameters = dict(model.named_parameters())
    watches = {
        layer: [
            Watch(name, rank, (len(parameters[layer]), parameters[layer][0].numel()))
            for name, rank in METHODS
        ]
        for layer in LAYERS
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = data.train.images.float(), data.train.labels.long()
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    for step in range(IGNORED + WATCHED):
        gradients = []
        for _ in range(WORKERS):
            chosen = torch.randint(len(labels), (IMAGES,))
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            gradients.append(torch.autograd.grad(loss, list(parameters.values())))
        for (name, parameter), parts in zip(
            parameters.items(), zip(*gradients, strict=True), strict=True
        ):
            parameter.grad = torch.stack(parts).mean(0)
            for watch in watches.get(name, ()) if step >= IGNORED else ():
                watch.step(parts)
        optimizer.step()
    return watches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    watches = watch_training(parser.parse_args().data_dir)
    print("layer                   method    rank      held  update  cosine")
    for layer, lines in watches.items():
        for watch in lines:
            print(watch.line(layer))


if __name__ == "__main__":
    main()
