"""CIFAR-10 and CIFAR-100: 50 000 + 10 000 colour images of 32 x 32 pixels, in the python or the binary layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.recipes.data.pickled import read_batch
from thinwire.recipes.data.pixels import Normalisation, Pixels
from thinwire.recipes.data.source import damaged, locate, reading
from thinwire.recipes.data.synthetic import make_images
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.objectives.images import Images

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
PADDING = 4


@dataclass(frozen=True, kw_only=True)
class Variety:
    """What tells the two sets apart."""

    source: str
    """Its name among the sources."""
    kind: Images
    label_key: bytes
    """In the pickles."""
    label_bytes: int
    """In a binary record; the last of them counts."""
    normalisation: Normalisation


CIFAR10 = Variety(
    source="cifar-10",
    kind=Images(channels=3, height=32, width=32, classes=10),
    label_key=b"labels",
    label_bytes=1,
    normalisation=Normalisation.of([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]),
)
CIFAR100 = Variety(
    source="cifar-100",
    kind=Images(channels=3, height=32, width=32, classes=100),
    label_key=b"fine_labels",
    label_bytes=2,
    normalisation=Normalisation.of([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
)


def load(variety: Variety, options: DataOptions) -> Data:
    if options.synthetic:
        return make_images(variety.kind, variety.normalisation, options, padding=PADDING, flip=True)
    found = locate(variety.source, options)
    read = read_python if found.layout == "python" else read_binary
    *train, test = (read(path, variety) for path in found.paths)
    return Data(
        variety.kind, join(train, variety, padding=PADDING, flip=True), join([test], variety)
    )


load_cifar10 = partial(load, CIFAR10)
load_cifar100 = partial(load, CIFAR100)


def join(
    parts: Sequence[tuple[Tensor, Tensor]], variety: Variety, padding: int = 0, flip: bool = False
) -> Pixels:
    images, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Pixels(
        images=images.view(-1, *SHAPE),
        labels=labels.long(),
        normalisation=variety.normalisation,
        padding=padding,
        flip=flip,
    )


def read_binary(path: Path, variety: Variety) -> tuple[Tensor, Tensor]:
    """Pixels [N, 3072] and labels [N] of a file of records: label bytes, then the red, green and blue planes."""
    with reading(path, "a CIFAR batch"):
        content = torch.from_numpy(np.fromfile(path, np.uint8))
    record = variety.label_bytes + PIXELS
    if len(content) == 0 or len(content) % record:
        raise damaged(path, f"its {len(content)} bytes are not a number of records of {record}")
    records = content.view(-1, record)
    return checked(path, variety, records[:, -PIXELS:], records[:, variety.label_bytes - 1])


def read_python(path: Path, variety: Variety) -> tuple[Tensor, Tensor]:
    """Pixels [N, 3072] and labels [N] of a pickled dictionary."""
    with reading(path, "a pickled CIFAR batch"), path.open("rb") as file:
        content = read_batch(file)
        pixels = torch.from_numpy(np.array(content[b"data"].values))
        labels = torch.tensor(content[variety.label_key], dtype=torch.int64)
    return checked(path, variety, pixels, labels)


def checked(path: Path, variety: Variety, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if pixels.shape != (len(labels), PIXELS):
        raise damaged(path, f"it holds {list(pixels.shape)} pixels for {len(labels)} labels")
    if not len(labels) or labels.min() < 0:
        raise damaged(path, "it must hold labels of 0 or more")
    if labels.max() >= variety.kind.classes:
        raise damaged(path, f"label {int(labels.max())} is not below {variety.kind.classes}")
    return pixels, labels
