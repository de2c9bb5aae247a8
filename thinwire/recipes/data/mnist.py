"""MNIST and Fashion-MNIST: 60 000 + 10 000 grey images of 28 x 28 pixels, in the idx format."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor

from thinwire.recipes.data.pixels import Normalisation, Pixels
from thinwire.recipes.data.source import Remote, Source, damaged, locate, reading
from thinwire.recipes.data.synthetic import make_images
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.objectives.images import Images

KIND = Images(channels=1, height=28, width=28, classes=10)
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
UNSIGNED_BYTE = 0x08
"""The element type in an idx header."""


def describe(
    name: str, folder: str, torchvision: str, url: str, checksums: tuple[str, ...]
) -> Source:
    """Four files, packed or not, in a folder of their own or where torchvision puts them."""
    return Source(
        name=name,
        layouts={
            f"{place}{suffix}": tuple(f"{place}/{file}{suffix}" for file in FILES)
            for place in (folder, f"{torchvision}/raw")
            for suffix in (".gz", "")
        },
        remotes=tuple(
            Remote(url=f"{url}/{file}.gz", path=f"{folder}/{file}.gz", checksum=f"md5:{checksum}")
            for file, checksum in zip(FILES, checksums, strict=True)
        ),
    )


MNIST = describe(
    "MNIST",
    "mnist",
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
FASHION_MNIST = describe(
    "Fashion-MNIST",
    "fashion-mnist",
    "FashionMNIST",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)


def load_mnist(options: DataOptions) -> Data:
    return load(MNIST, Normalisation.of([0.1307], [0.3081]), options)


def load_fashion_mnist(options: DataOptions) -> Data:
    return load(FASHION_MNIST, Normalisation.of([0.2860], [0.3530]), options)


def load(source: Source, normalisation: Normalisation, options: DataOptions) -> Data:
    if options.synthetic:
        return make_images(KIND, normalisation, options)
    paths = locate(source, options).paths
    train, test = (
        read_pair(*pair, normalisation) for pair in ((paths[0], paths[1]), (paths[2], paths[3]))
    )
    return Data(KIND, train, test)


def read_pair(images_path: Path, labels_path: Path, normalisation: Normalisation) -> Pixels:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (KIND.height, KIND.width):
        raise damaged(images_path, f"it holds {list(images.shape)} bytes, not images of 28 x 28")
    if labels.shape != images.shape[:1] or labels.max() >= KIND.classes:
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
