"""MNIST and Fashion-MNIST: 60 000 + 10 000 grey images of 28 x 28 pixels, in the idx format."""

from __future__ import annotations

import gzip
import struct
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinwire.recipes.data.pixels import Normalisation, Pixels
from thinwire.recipes.data.source import damaged, locate, reading
from thinwire.recipes.data.synthetic import make_images
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.objectives.images import Images

KIND = Images(channels=1, height=28, width=28, classes=10)
UNSIGNED_BYTE = 0x08
"""The element type in an idx header."""


def load(source: str, normalisation: Normalisation, options: DataOptions) -> Data:
    if options.synthetic:
        return make_images(KIND, normalisation, options)
    paths = locate(source, options).paths
    train, test = (
        read_pair(*pair, normalisation) for pair in ((paths[0], paths[1]), (paths[2], paths[3]))
    )
    return Data(KIND, train, test)


load_mnist = partial(load, "mnist", Normalisation.of([0.1307], [0.3081]))
load_fashion_mnist = partial(load, "fashion-mnist", Normalisation.of([0.2860], [0.3530]))


def read_pair(images_path: Path, labels_path: Path, normalisation: Normalisation) -> Pixels:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (KIND.height, KIND.width):
        raise damaged(images_path, f"it holds {list(images.shape)} bytes, not images of 28 x 28")
    if not len(labels) or labels.shape != images.shape[:1] or labels.max() >= KIND.classes:
        raise damaged(
            labels_path,
            f"it must hold a label below {KIND.classes} for each of {len(images)} images",
        )
    return Pixels(images=images.unsqueeze(1), labels=labels.long(), normalisation=normalisation)


def read_idx(path: Path) -> Tensor:
    """Unsigned bytes of any shape: two zeros, element type, number of dimensions, each size big-endian, then the bytes."""
    with reading(path, "an idx file"):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        if zeros != 0 or kind != UNSIGNED_BYTE:
            raise ValueError(f"its header is {content[:4].hex()}")
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        values = torch.frombuffer(bytearray(content[4 + 4 * dimensions :]), dtype=torch.uint8)
        return values.view(shape)
