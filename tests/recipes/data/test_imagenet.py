from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.recipes.data import official
from thinwire.errors import UsageError
from thinwire.recipes.data.imagenet import NORMALISATION, choose_box, decode, load
from thinwire.recipes.examples import DataOptions


def test_folders_are_classes_and_images_are_cut_to_size(tmp_path: Path) -> None:
    official.write_imagenet(tmp_path)
    data = load(DataOptions(data_dir=tmp_path))
    assert (data.kind.classes, data.kind.height) == (3, 224)  # type: ignore[attr-defined]
    index = torch.tensor([0, 20, 47])
    images, labels = data.train.batch(index, torch.Generator().manual_seed(0))
    assert images.shape == (3, 3, 224, 224)
    assert images.is_contiguous()
    assert labels.tolist() == [0, 1, 2]
    others, _ = data.train.batch(index, torch.Generator().manual_seed(1))
    assert not torch.equal(images, others)


def test_a_test_image_is_the_middle(tmp_path: Path) -> None:
    """Seven eighths of the shorter side, and what scaling down mixes in of the next two pixels."""
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[2:62, 18:78] = (200, 100, 50)
    path = tmp_path / "framed.png"
    Image.fromarray(pixels).save(path)
    assert (decode(path, 32, None) == (200, 100, 50)).all()


def test_batches_are_normalised(tmp_path: Path) -> None:
    for part in ("train", "val"):
        folder = tmp_path / "imagenet" / part / "grey"
        folder.mkdir(parents=True)
        Image.new("L", (50, 40), 128).save(folder / "one.png")
    data = load(DataOptions(data_dir=tmp_path, tiny=True))
    images, _ = data.train.batch(torch.tensor([0]), torch.Generator().manual_seed(0))
    grey = NORMALISATION.apply(torch.full((1, 3, 32, 32), 128, dtype=torch.uint8))
    assert torch.equal(images, grey)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (30, 900), (900, 30), (224, 224)])
def test_a_random_part_lies_inside(width: int, height: int) -> None:
    areas = []
    for draws in torch.rand(200, 23, generator=torch.Generator().manual_seed(0)).tolist():
        left, upper, right, lower = choose_box(width, height, draws)
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height
        # Up to half a pixel is rounded away.
        assert (right - left) / (lower - upper) == pytest.approx(1, rel=0.4)
        areas.append((right - left) * (lower - upper) / (width * height))
    if width == height:
        assert min(areas) < 0.15
        assert max(areas) > 0.9


def test_what_is_no_image_is_one_sentence(tmp_path: Path) -> None:
    official.write_imagenet(tmp_path)
    (tmp_path / "imagenet" / "train" / "n00000000" / "image_0.JPEG").write_bytes(b"no image")
    data = load(DataOptions(data_dir=tmp_path, tiny=True))
    with pytest.raises(UsageError, match=r"image_0.JPEG is damaged .* it is not an image"):
        data.train.batch(torch.tensor([0]), None)


def test_folders_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    official.write_imagenet(tmp_path)
    (tmp_path / "imagenet" / "val" / "n99999999").mkdir()
    with pytest.raises(UsageError, match="class n99999999 has no folder to learn from"):
        load(DataOptions(data_dir=tmp_path))


@pytest.mark.parametrize(
    ("folders", "message"),
    [((), "a folder of images per class"), (("n1",), r"holds no image \(.jpeg, .jpg")],
)
def test_empty_folders_are_one_sentence(
    folders: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    for part in ("train", "val"):
        for name in folders:
            (tmp_path / "imagenet" / part / name).mkdir(parents=True)
        (tmp_path / "imagenet" / part).mkdir(parents=True, exist_ok=True)
    with pytest.raises(UsageError, match=message):
        load(DataOptions(data_dir=tmp_path))
