"""WikiText-2 and WikiText-103: articles of Wikipedia, as words or in GPT-2's byte pairs."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.recipes.data.source import damaged, locate, reading
from thinwire.recipes.data.streams import Streams, WholeText, Windows
from thinwire.recipes.data.synthetic import TINY_VOCABULARY, make_tokens
from thinwire.recipes.data.vocabularies import GPT2_VOCABULARY, read_byte_pairs
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.objectives.tokens import Tokens

WORDS = {"wikitext-2": 33278, "wikitext-103": 267735}
"""Sizes of the official vocabularies, the end of a line being a word."""
LSTM_WINDOW = 70
TRANSFORMER_WINDOW = 100
GPT_WINDOW = 1024
TINY_WINDOW = 32
LINES_AT_ONCE = 1 << 14
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


# -- words -----------------------------------------------------------------------------------------------------


def load_words(folder: str, window: int, options: DataOptions) -> Data:
    """Words as they stand; the vocabulary is that of the training text."""
    length = TINY_WINDOW if options.tiny else window
    if options.synthetic:
        words = TINY_VOCABULARY if options.tiny else WORDS[folder]
        return make_tokens(Tokens(vocabulary=words, length=length), options)
    train_path, _, test_path = locate(folder, options).paths
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
    train_path, _, test_path = locate(f"{folder}-raw", options).paths
    tokenizer = read_byte_pairs(*locate("gpt2-vocabulary", options).paths)
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


load_wikitext2 = partial(load_words, "wikitext-2", LSTM_WINDOW)
load_wikitext2_long = partial(load_words, "wikitext-2", TRANSFORMER_WINDOW)
load_wikitext103 = partial(load_words, "wikitext-103", LSTM_WINDOW)
load_wikitext2_gpt2 = partial(load_byte_pairs, "wikitext-2")
load_wikitext103_gpt2 = partial(load_byte_pairs, "wikitext-103")
