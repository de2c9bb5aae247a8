"""Small data in the official format of every set, written where the loaders look for it."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TRAIN, TEST = 48, 12
WORDS = ["the", "a", "of", "king", "queen", "crown", "is", "rules", "over", "land", "and", "old"]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


# -- images ----------------------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_idx(folder: Path, packed: bool = True) -> None:
    draw = rng()
    for name, count in (("train", TRAIN), ("t10k", TEST)):
        for part, values in (
            ("images-idx3", draw.integers(256, size=(count, 28, 28))),
            ("labels-idx1", draw.integers(10, size=count)),
        ):
            content = idx(values)
            path = folder / f"{name}-{part}-ubyte{'.gz' if packed else ''}"
            write_bytes(path, gzip.compress(content) if packed else content)


def write_mnist(folder: Path) -> None:
    write_idx(folder / "mnist")


def write_fashion_mnist(folder: Path) -> None:
    write_idx(folder / "fashion-mnist", packed=False)


def draw_cifar(classes: int, files: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pixels and labels of so many training files and the test file."""
    draw = rng()
    return [
        (
            draw.integers(256, size=(count, 3072)).astype(np.uint8),
            draw.integers(classes, size=count).astype(np.uint8),
        )
        for count in [TRAIN // files + 1] * files + [TEST]
    ]


def write_cifar10(folder: Path) -> None:
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name, (pixels, labels) in zip(names, draw_cifar(10, files=5), strict=True):
        records = np.concatenate([labels[:, None], pixels], axis=1)
        write_bytes(folder / "cifar-10-batches-bin" / name, records.tobytes())


def write_cifar10_python(folder: Path) -> None:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, (pixels, labels) in zip(names, draw_cifar(10, files=5), strict=True):
        content = {b"batch_label": b"one of some", b"labels": labels.tolist(), b"data": pixels}
        write_bytes(folder / "cifar-10-batches-py" / name, pickle.dumps(content, protocol=2))


def write_cifar100(folder: Path) -> None:
    for name, (pixels, labels) in zip(
        ("train.bin", "test.bin"), draw_cifar(100, files=1), strict=True
    ):
        records = np.concatenate([labels[:, None] // 5, labels[:, None], pixels], axis=1)
        write_bytes(folder / "cifar-100-binary" / name, records.tobytes())


def write_cifar100_python(folder: Path) -> None:
    for name, (pixels, labels) in zip(("train", "test"), draw_cifar(100, files=1), strict=True):
        content = {
            b"coarse_labels": (labels // 5).tolist(),
            b"fine_labels": labels.tolist(),
            b"data": pixels,
        }
        write_bytes(folder / "cifar-100-python" / name, pickle.dumps(content, protocol=2))


def write_imagenet(folder: Path) -> None:
    from PIL import Image

    draw = rng()
    for part, count in (("train", TRAIN), ("val", TEST)):
        for i in range(count):
            path = folder / "imagenet" / part / f"n0000000{i % 3}" / f"image_{i}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(256, size=(40 + i % 5, 48, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(path)


# -- text ------------------------------------------------------------------------------------------------------


def sentences(count: int, draw: np.random.Generator) -> list[str]:
    return [" ".join(draw.choice(WORDS, size=draw.integers(4, 10))) + " ." for _ in range(count)]


def write_wikitext(folder: Path, name: str, pattern: str) -> None:
    draw = rng()
    for part, count in (("train", 200), ("valid", 5), ("test", 40)):
        text = sentences(count, draw)
        lines = [" \n", " = Kings = \n", *(f" {sentence} \n" for sentence in text)]
        write_text(folder / name / pattern.format(part), "".join(lines))


def write_wikitext2(folder: Path) -> None:
    write_wikitext(folder, "wikitext-2", "wiki.{}.tokens")


def write_wikitext103(folder: Path) -> None:
    write_wikitext(folder, "wikitext-103", "{}.txt")


def write_gpt2_vocabulary(folder: Path) -> None:
    """Every byte and two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [*sorted(ByteLevel.alphabet()), "th", "the"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    write_text(folder / "gpt2-bpe" / "vocab.json", json.dumps(vocabulary))
    write_text(folder / "gpt2-bpe" / "merges.txt", "#version: 0.2\nt h\nth e\n")


def write_wikitext2_gpt2(folder: Path) -> None:
    write_wikitext(folder, "wikitext-2-raw", "wiki.{}.raw")
    write_gpt2_vocabulary(folder)


def write_wikitext103_gpt2(folder: Path) -> None:
    write_wikitext103(folder)
    write_gpt2_vocabulary(folder)


def write_bert_vocabulary(folder: Path) -> None:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *WORDS, ".", "?"]
    write_text(folder / "bert-vocab" / "vocab.txt", "\n".join(dict.fromkeys(pieces)) + "\n")


def squad_file(paragraphs: int) -> dict[str, Any]:
    """Two questions about each paragraph, whose answers are words of it."""
    draw = rng()
    found = []
    for _ in range(paragraphs):
        context = " ".join(sentences(12, draw)).replace(" .", ".").capitalize()
        questions = []
        for text in ("Who rules the land?", "Is the king old?"):
            words = context.split()
            place = int(draw.integers(len(words)))
            begin = len(" ".join(words[:place])) + (place > 0)
            answer = {"text": words[place].rstrip("."), "answer_start": begin}
            questions.append({"id": text, "question": text, "answers": [answer] * 3})
        found.append({"context": context, "qas": questions})
    return {"version": "1.1", "data": [{"title": "Kings", "paragraphs": found}]}


def write_squad(folder: Path) -> None:
    write_bert_vocabulary(folder)
    for name, paragraphs in (("train", 16), ("dev", 4)):
        write_text(folder / "squad-v1.1" / f"{name}-v1.1.json", json.dumps(squad_file(paragraphs)))


def write_wikipedia(folder: Path) -> None:
    write_bert_vocabulary(folder)
    draw = rng()
    for name, documents in (("train", 30), ("test", 6)):
        text = "\n\n".join("\n".join(sentences(8, draw)) for _ in range(documents))
        write_text(folder / "wikipedia" / f"{name}.txt", text + "\n")


def write_an4(folder: Path, width: int = 13) -> None:
    draw = rng()
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        lengths = draw.integers(40, 60, size=count)
        arrays[f"{part}_len"] = lengths.astype(np.int32)
        arrays[f"{part}_feat"] = draw.normal(3, 2, size=(lengths.sum(), width)).astype(np.float16)
        arrays[f"{part}_text"] = np.array([draw.choice(["YES", "GO ON", "A B"]) for _ in lengths])
        arrays[f"{part}_id"] = np.array([f"an{i}" for i in range(count)])
    (folder / "an4").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "an4" / "features.npz", **arrays)


def write_shakespeare(folder: Path) -> None:
    write_text(folder / "tinyshakespeare" / "input.txt", "\n".join(sentences(200, rng())))


WRITERS: dict[str, Callable[[Path], None]] = {
    "mnist": write_mnist,
    "fashion-mnist": write_fashion_mnist,
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "imagenet": write_imagenet,
    "wikitext2": write_wikitext2,
    "wikitext2-100": write_wikitext2,
    "wikitext103": write_wikitext103,
    "wikitext2-gpt2": write_wikitext2_gpt2,
    "wikitext103-gpt2": write_wikitext103_gpt2,
    "squad": write_squad,
    "squad-256": write_squad,
    "wikipedia": write_wikipedia,
    "an4": write_an4,
    "chars": write_shakespeare,
}
"""By the name of the data set; digits needs no file."""

NEED_TOKENIZERS = frozenset(
    {"wikitext2-gpt2", "wikitext103-gpt2", "squad", "squad-256", "wikipedia"}
)
