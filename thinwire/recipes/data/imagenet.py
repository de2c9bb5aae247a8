"""ImageNet, or any images in class folders: decoded and cropped when they are asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.recipes.data.pixels import Normalisation
from thinwire.recipes.data.source import damaged, locate, reading
from thinwire.recipes.data.synthetic import make_images
from thinwire.recipes.examples import Batch, Data, DataOptions, Examples
from thinwire.recipes.objectives.images import Images

CLASSES = 1000
SIZE = 224
TINY_SIZE = 32
TINY_CLASSES = 10
NORMALISATION = Normalisation.of([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
SUFFIXES = frozenset({".jpeg", ".jpg", ".png", ".webp"})
TEST_SHARE = SIZE / 256
"""A test image is the middle of the image, so much of its shorter side."""
LEAST_AREA = 0.08
WIDEST = math.log(4 / 3)
"""Of the crop's width over its height, either way."""
TRIES = 10


def load(options: DataOptions) -> Data:
    size = TINY_SIZE if options.tiny else SIZE
    if options.synthetic:
        classes = TINY_CLASSES if options.tiny else CLASSES
        kind = Images(channels=3, height=size, width=size, classes=classes)
        return make_images(kind, NORMALISATION, options, flip=True)
    check_pillow()
    train_folder, test_folder = locate("imagenet", options).paths
    classes_found = list_classes(train_folder)
    train, test = (
        list_images(folder, classes_found, size) for folder in (train_folder, test_folder)
    )
    kind = Images(channels=3, height=size, width=size, classes=len(classes_found))
    return Data(kind, train, test)


def check_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "ImageNet needs the package Pillow; pip install 'thinwire[train]' brings it"
        ) from error


def list_classes(folder: Path) -> list[str]:
    """Names of the class folders; their order gives the labels."""
    with reading(folder, "a folder"):
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not names:
        raise damaged(folder, "it must hold a folder of images per class")
    return names


def list_images(folder: Path, classes: Sequence[str], size: int) -> ImageFiles:
    unknown = set(list_classes(folder)) - set(classes)
    if unknown:
        raise damaged(folder, f"class {min(unknown)} has no folder to learn from")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        files = [
            e.path for e in os.scandir(folder / name) if Path(e.name).suffix.lower() in SUFFIXES
        ]
        paths.extend(sorted(files))
        labels.extend([label] * len(files))
    if not paths:
        raise damaged(folder, f"it holds no image ({', '.join(sorted(SUFFIXES))})")
    return ImageFiles(
        paths=paths, labels=torch.tensor(labels), size=size, device=torch.device("cpu")
    )


@dataclass(frozen=True, kw_only=True)
class ImageFiles(Examples):
    """Image files and their labels [N] int64; decoded by threads, normalised on the device."""

    paths: Sequence[str]
    labels: Tensor
    size: int
    device: torch.device

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        """In training a random part of each image, in random proportions and mirrored every other time; else its middle."""
        paths = [Path(self.paths[place]) for place in index.tolist()]
        draws: list[Any] = [None] * len(paths)
        if generator is not None:
            draws = torch.rand(len(paths), 2 * TRIES + 3, generator=generator).tolist()
        decoded = self._threads.map(
            lambda path, drawn: decode(path, self.size, drawn), paths, draws
        )
        pixels = torch.from_numpy(np.stack(list(decoded))).to(self.device, non_blocking=True)
        images = NORMALISATION.to(self.device).apply(pixels.permute(0, 3, 1, 2).contiguous())
        return images, self.labels[index].to(self.device, non_blocking=True)

    def to(self, device: torch.device) -> ImageFiles:
        return replace(self, device=device)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // workers))


def decode(path: Path, size: int, draws: Sequence[float] | None) -> np.ndarray:
    """A square of bytes [size, size, 3] out of an image, by numbers in [0, 1), or its middle."""
    from PIL import Image

    with reading(path, "an image"), Image.open(path) as file:
        image = file.convert("RGB")
        if draws is None:
            box = middle(image.width, image.height)
            return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
        part = image.crop(choose_box(image.width, image.height, draws))
        square = part.resize((size, size), Image.Resampling.BILINEAR)
        if draws[-1] < 0.5:
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(square)


def middle(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, upper, right and lower edge of a square."""
    side = min(width, height) * TEST_SHARE
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def choose_box(width: int, height: int, draws: Sequence[float]) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of a part of 8 to 100 % of the area, in proportions of 3:4 to 4:3.

    1. Draw area and proportions until the part fits into the image, at most TRIES times.
    2. Else take the largest part of allowed proportions.
    3. Put it anywhere in the image.
    """
    for area_drawn, ratio_drawn in zip(draws[:TRIES], draws[TRIES : 2 * TRIES], strict=True):
        area = width * height * (LEAST_AREA + (1 - LEAST_AREA) * area_drawn)
        ratio = math.exp(WIDEST * (2 * ratio_drawn - 1))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            break
    else:
        wide = min(width, round(height * math.exp(WIDEST)))
        high = min(height, round(width * math.exp(WIDEST)))
    left = int((width - wide + 1) * draws[2 * TRIES])
    upper = int((height - high + 1) * draws[2 * TRIES + 1])
    return left, upper, left + wide, upper + high
