from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.recipes.data import official
from thinwire.errors import UsageError
from thinwire.recipes.data.cifar import load_cifar10, load_cifar100
from thinwire.recipes.data.mnist import load_fashion_mnist, load_mnist
from thinwire.recipes.data.pixels import Normalisation, Pixels
from thinwire.recipes.examples import Data, DataOptions


def pixels_of(data: Data) -> tuple[Pixels, Pixels]:
    assert isinstance(data.train, Pixels)
    assert isinstance(data.test, Pixels)
    return data.train, data.test


def same(one: Data, other: Data) -> bool:
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
        for a, b in zip(pixels_of(one), pixels_of(other), strict=True)
    )


# -- augmentation ----------------------------------------------------------------------------------------------


def make_pixels(padding: int, flip: bool) -> Pixels:
    images = torch.randint(256, (6, 3, 5, 7), dtype=torch.uint8)
    return Pixels(
        images=images,
        labels=torch.arange(6),
        normalisation=Normalisation.of([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]),
        padding=padding,
        flip=flip,
    )


def test_evaluation_only_normalises() -> None:
    examples = make_pixels(padding=2, flip=True)
    index = torch.tensor([3, 1])
    images, labels = examples.batch(index, None)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    expected = (examples.images[index] / 255.0 - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(images, expected)
    assert labels.tolist() == [3, 1]


@pytest.mark.parametrize(("padding", "flip"), [(2, True), (2, False), (0, True)])
def test_crops_and_flips_are_those_of_the_plain_loop(padding: int, flip: bool) -> None:
    examples = make_pixels(padding, flip)
    drawn = examples.draw(torch.arange(6), torch.Generator().manual_seed(3))
    augmented = examples.augment(examples.images, drawn[:, 1:])
    generator = torch.Generator().manual_seed(3)
    corners = torch.randint(2 * padding + 1, (6, 2), generator=generator).tolist()
    flips = torch.randint(2 if flip else 1, (6, 1), generator=generator).flatten().tolist()
    for image, result, (row, column), mirrored in zip(
        examples.images, augmented, corners, flips, strict=True
    ):
        wide = torch.zeros(3, 5 + 2 * padding, 7 + 2 * padding, dtype=torch.uint8)
        wide[:, padding : padding + 5, padding : padding + 7] = image
        crop = wide[:, row : row + 5, column : column + 7]
        assert torch.equal(result, crop.flip(2) if mirrored else crop)
    assert augmented.is_contiguous()


def test_every_crop_and_both_sides_come_up() -> None:
    examples = Pixels(
        images=torch.arange(9, dtype=torch.uint8).view(1, 1, 3, 3),
        labels=torch.zeros(1, dtype=torch.int64),
        normalisation=Normalisation.of([0.0], [1 / 255]),
        padding=1,
        flip=True,
    )
    images, _ = examples.batch(
        torch.zeros(500, dtype=torch.int64), torch.Generator().manual_seed(0)
    )
    assert len(images.flatten(1).round().unique(dim=0)) == 9 * 2


# -- MNIST -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "packed"), [("mnist", False), ("MNIST/raw", True)])
def test_mnist_may_be_unpacked_or_where_torchvision_puts_it(
    place: str, packed: bool, tmp_path: Path
) -> None:
    official.write_mnist(tmp_path / "one")
    official.write_idx(tmp_path / "other" / place, packed)
    one, other = (load_mnist(DataOptions(data_dir=tmp_path / name)) for name in ("one", "other"))
    assert same(one, other)
    assert len(one.train) == official.TRAIN
    assert len(one.test) == official.TEST


def test_fashion_mnist_is_not_mnist(tmp_path: Path) -> None:
    official.write_fashion_mnist(tmp_path)
    assert len(load_fashion_mnist(DataOptions(data_dir=tmp_path)).train) == official.TRAIN
    with pytest.raises(UsageError, match="MNIST is not complete"):
        load_mnist(DataOptions(data_dir=tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"no idx file", r"damaged .* its header is 6e6f2069"),
        ("train-images-idx3-ubyte", b"", "damaged or of another kind; it is not an idx file"),
        ("train-labels-idx1-ubyte", official.idx(np.zeros(3)), "label below 10 for each of 48"),
        ("t10k-labels-idx1-ubyte", official.idx(np.full(12, 77)), "label below 10 for each of 12"),
        ("t10k-images-idx3-ubyte", official.idx(np.zeros((12, 9, 9))), "not images of 28 x 28"),
    ],
)
def test_damaged_idx_files_are_one_sentence(
    file: str, content: bytes, message: str, tmp_path: Path
) -> None:
    official.write_mnist(tmp_path)
    (tmp_path / "mnist" / f"{file}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UsageError, match=message):
        load_mnist(DataOptions(data_dir=tmp_path))


def test_a_truncated_gzip_file_is_one_sentence(tmp_path: Path) -> None:
    official.write_mnist(tmp_path)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"ubyte.gz is damaged or of another kind; it is not"):
        load_mnist(DataOptions(data_dir=tmp_path))


# -- CIFAR -----------------------------------------------------------------------------------------------------


def test_both_layouts_of_cifar10_are_the_same_images(tmp_path: Path) -> None:
    official.write_cifar10(tmp_path / "binary")
    official.write_cifar10_python(tmp_path / "python")
    one, other = (load_cifar10(DataOptions(data_dir=tmp_path / x)) for x in ("binary", "python"))
    assert same(one, other)
    pixels, labels = official.draw_cifar(10, files=5)[1]
    train, test = pixels_of(one)
    second = slice(len(labels), 2 * len(labels))
    assert train.images[second].flatten(1).tolist() == pixels.tolist()
    assert train.labels[second].tolist() == labels.tolist()
    assert (train.padding, train.flip) == (4, True)
    assert (test.padding, test.flip) == (0, False)


def test_both_layouts_of_cifar100_have_the_fine_labels(tmp_path: Path) -> None:
    official.write_cifar100(tmp_path / "binary")
    official.write_cifar100_python(tmp_path / "python")
    one, other = (load_cifar100(DataOptions(data_dir=tmp_path / x)) for x in ("binary", "python"))
    assert same(one, other)
    train, _ = pixels_of(one)
    assert train.labels.tolist() == official.draw_cifar(100, files=1)[0][1].tolist()


def test_a_truncated_binary_file_is_one_sentence(tmp_path: Path) -> None:
    official.write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"data_batch_3.bin is damaged .* records of 3073"):
        load_cifar10(DataOptions(data_dir=tmp_path))


def test_cifar100_is_not_taken_for_cifar10(tmp_path: Path) -> None:
    """Records of one byte more, or labels that do not exist."""
    official.write_cifar10_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    content = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [99]}
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UsageError, match="label 99 is not below 10"):
        load_cifar10(DataOptions(data_dir=tmp_path))


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({b"data": Evil()}), "asks for builtins.print, which no batch needs"),
        (pickle.dumps({b"labels": [1]}), "not a pickled CIFAR batch: b'data'"),
        (b"no pickle", "it is not a pickled CIFAR batch"),
    ],
)
def test_a_pickle_can_do_no_harm(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    official.write_cifar10_python(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_cifar10(DataOptions(data_dir=tmp_path))
    assert "it ran" not in capsys.readouterr().out
