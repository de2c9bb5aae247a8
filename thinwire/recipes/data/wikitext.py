"""WikiText-2 and WikiText-103: articles of Wikipedia, as words or in GPT-2's byte pairs."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.recipes.data.source import Remote, Source, damaged, locate, reading
from thinwire.recipes.data.streams import Streams, WholeText, Windows
from thinwire.recipes.data.synthetic import TINY_VOCABULARY, make_tokens
from thinwire.recipes.data.vocabularies import GPT2_BPE, GPT2_VOCABULARY, read_byte_pairs
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.objectives.tokens import Tokens

SITE = "https://wikitext.smerity.com"
"""The author's own; the address of the paper is gone."""
WORDS = {"wikitext-2": 33278, "wikitext-103": 267735}
"""Sizes of the official vocabularies, the end of a line being a word."""
CHECKSUMS = {
    "wikitext-2-v1": "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "wikitext-2-raw-v1": "sha256:ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    "wikitext-103-v1": "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    "wikitext-103-raw-v1": "sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
}
LSTM_WINDOW = 70
TRANSFORMER_WINDOW = 100
GPT_WINDOW = 1024
TINY_WINDOW = 32
LINES_AT_ONCE = 1 << 14
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


def load_wikitext2(options: DataOptions) -> Data:
    return load_words("wikitext-2", LSTM_WINDOW, options)


def load_wikitext2_long(options: DataOptions) -> Data:
    return load_words("wikitext-2", TRANSFORMER_WINDOW, options)


def load_wikitext103(options: DataOptions) -> Data:
    return load_words("wikitext-103", LSTM_WINDOW, options)


def load_wikitext2_gpt2(options: DataOptions) -> Data:
    return load_byte_pairs("wikitext-2", options)


def load_wikitext103_gpt2(options: DataOptions) -> Data:
    return load_byte_pairs("wikitext-103", options)


def describe(folder: str, raw: bool) -> Source:
    """The word-level files by their official or their short names; also the raw text, and that first, if asked."""
    parts = ("train", "valid", "test")
    layouts = {
        "official": tuple(f"{folder}/wiki.{part}.tokens" for part in parts),
        "short": tuple(f"{folder}/{part}.txt" for part in parts),
    }
    if raw:
        layouts = {"raw": tuple(f"{folder}-raw/wiki.{part}.raw" for part in parts), **layouts}
    archive = f"{folder}-raw-v1" if raw else f"{folder}-v1"
    return Source(
        name=folder.replace("wikitext", "WikiText"),
        layouts=layouts,
        remotes=(
            Remote(
                url=f"{SITE}/{archive}.zip",
                path=f"{archive}.zip",
                checksum=CHECKSUMS[archive],
                unpack=True,
            ),
        ),
    )


# -- words -----------------------------------------------------------------------------------------------------


def load_words(folder: str, window: int, options: DataOptions) -> Data:
    """Words as they stand; the vocabulary is that of the training text."""
    length = TINY_WINDOW if options.tiny else window
    if options.synthetic:
        words = TINY_VOCABULARY if options.tiny else WORDS[folder]
        return make_tokens(Tokens(vocabulary=words, length=length), options)
    train_path, _, test_path = locate(describe(folder, raw=False), options).paths
    vocabulary: defaultdict[str, int] = defaultdict()
    vocabulary.default_factory = vocabulary.__len__
    unknown = vocabulary[UNKNOWN]
    train = encode_words(train_path, vocabulary.__getitem__, length)
    test = encode_words(test_path, lambda word: vocabulary.get(word, unknown), length)
    return Data(
        Tokens(vocabulary=len(vocabulary), length=length),
        Streams(tokens=train, length=length),
        WholeText(tokens=test, length=length),
    )


def encode_words(path: Path, number: Callable[[str], int], length: int) -> Tensor:
    """The number of each word, line ends included."""
    numbers = array("i")
    for line in read_lines(path):
        numbers.extend(map(number, line.split()))
        numbers.append(number(END_OF_LINE))
    return to_tokens(path, numbers, length)


def read_lines(path: Path) -> Iterator[str]:
    with reading(path, "text in UTF-8"), path.open(encoding="utf-8", newline="\n") as file:
        yield from file


def to_tokens(path: Path, numbers: array[int], length: int) -> Tensor:
    if len(numbers) <= length:
        raise damaged(
            path, f"it must hold more than {length} tokens, one window, but has {len(numbers)}"
        )
    return torch.frombuffer(numbers, dtype=torch.int32)


# -- byte pairs ------------------------------------------------------------------------------------------------


def load_byte_pairs(folder: str, options: DataOptions) -> Data:
    """GPT-2's tokens in windows that do not overlap, shuffled in training."""
    length = TINY_WINDOW if options.tiny else GPT_WINDOW
    if options.synthetic:
        pieces = TINY_VOCABULARY if options.tiny else GPT2_VOCABULARY
        return make_tokens(Tokens(vocabulary=pieces, length=length), options, shuffled=True)
    train_path, _, test_path = locate(describe(folder, raw=True), options).paths
    tokenizer = read_byte_pairs(*locate(GPT2_BPE, options).paths)
    train, test = (
        Windows(tokens=encode_byte_pairs(path, tokenizer, length), length=length)
        for path in (train_path, test_path)
    )
    return Data(Tokens(vocabulary=tokenizer.get_vocab_size(), length=length), train, test)


def encode_byte_pairs(path: Path, tokenizer: Any, length: int) -> Tensor:
    """The text line by line, line ends included."""
    numbers = array("i")
    lines = read_lines(path)
    while some := list(islice(lines, LINES_AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(some):
            numbers.extend(encoding.ids)
    return to_tokens(path, numbers, length)
