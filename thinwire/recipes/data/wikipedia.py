"""Wikipedia for BERT: pairs of passages, some of whose tokens are masked, made when they are asked for.

The text has one sentence per line and a blank line between documents. It is never read as a whole, so that it may be
of any size: only where its lines begin is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.recipes.data.source import damaged, locate, reading
from thinwire.recipes.data.synthetic import TINY_VOCABULARY, make_pretraining
from thinwire.recipes.data.vocabularies import BERT_VOCABULARY, read_word_pieces
from thinwire.recipes.examples import Batch, Data, DataOptions, Examples
from thinwire.recipes.objectives.pretraining import NOT_MASKED, Pretraining

LENGTH = 128
TINY_LENGTH = 32
BYTES_PER_TOKEN = 5
"""English, with its spaces, in BERT's word pieces: how much text about fills an example."""
SCANNED_AT_ONCE = 1 << 26
NEWLINE = 10
SHORTEST_SENTENCE = 2
"""In bytes; a line below that is blank."""
MASKED_SHARE, MASKED_AS_MASK, MASKED_AS_RANDOM = 0.15, 0.8, 0.1
TRIES = 10


def load(options: DataOptions) -> Data:
    length = TINY_LENGTH if options.tiny else LENGTH
    if options.synthetic:
        vocabulary = TINY_VOCABULARY if options.tiny else BERT_VOCABULARY
        return make_pretraining(Pretraining(vocabulary=vocabulary, length=length), options)
    paths = locate("wikipedia", options).paths
    (vocabulary_path,) = locate("bert-vocabulary", options).paths
    tokenizer = read_word_pieces(vocabulary_path)
    train, test = (
        Pairs(passages=read_passages(path, length), tokenizer=tokenizer, length=length)
        for path in paths
    )
    kind = Pretraining(vocabulary=tokenizer.get_vocab_size(), length=length)
    return Data(kind, train, test)


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Neighbouring sentences of one document that are about as long as an example."""

    text: np.ndarray
    """The bytes of the file, mapped."""
    begin: np.ndarray
    end: np.ndarray
    """Where each sentence begins and ends in the text."""
    first: np.ndarray
    """[passages + 1]: the sentence at which each passage begins."""
    document: np.ndarray
    """That each passage is of."""

    def __len__(self) -> int:
        return len(self.document)

    def sentences(self, first: int, last: int) -> str:
        """The sentences `first` up to `last`, which must be of one document."""
        content = self.text[self.begin[first] : self.end[last - 1]]
        return content.tobytes().decode("utf-8", errors="replace")


def read_passages(path: Path, length: int) -> Passages:
    """Find sentences, documents and passages.

    1. A sentence is a line of more than one byte; a shorter one ends a document.
    2. Every `length` x BYTES_PER_TOKEN bytes of a document another passage begins, at the next sentence.
    """
    with reading(path, "text"):
        text = np.memmap(path, np.uint8, mode="r")
    ends = np.concatenate(
        [
            begin + np.flatnonzero(text[begin : begin + SCANNED_AT_ONCE] == NEWLINE)
            for begin in range(0, len(text), SCANNED_AT_ONCE)
        ]
    )
    if text[-1] != NEWLINE:
        ends = np.append(ends, len(text))
    begins = np.concatenate([[0], ends[:-1] + 1])
    is_sentence = ends - begins >= SHORTEST_SENTENCE
    if not is_sentence.any():
        raise damaged(path, "it holds no sentence")
    document = np.cumsum(~is_sentence)[is_sentence]
    begins, ends = begins[is_sentence], ends[is_sentence]
    _, opening, place = np.unique(document, return_index=True, return_inverse=True)
    part = (begins - begins[opening][place]) // (length * BYTES_PER_TOKEN)
    is_new = np.ones(len(begins), bool)
    is_new[1:] = (document[1:] != document[:-1]) | (part[1:] != part[:-1])
    first = np.flatnonzero(is_new)
    return Passages(
        text=text,
        begin=begins,
        end=ends,
        first=np.append(first, len(begins)),
        document=document[first],
    )


@dataclass(frozen=True, kw_only=True)
class Pairs(Examples):
    """[CLS] passage [SEP] what follows it, or something else [SEP]; a place is a passage."""

    passages: Passages
    tokenizer: Any
    length: int

    def __len__(self) -> int:
        return len(self.passages)

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        """Every example draws from a generator of its own; in evaluation its place is the seed."""
        seeds = index
        if generator is not None:
            seeds = torch.randint(1 << 62, (len(index),), generator=generator)
        draws = [np.random.default_rng(seed) for seed in seeds.tolist()]
        drawn = [self.draw(*pair) for pair in zip(index.tolist(), draws, strict=True)]
        texts = [text for first, second, _ in drawn for text in (first, second)]
        pieces = [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        ids, types = self.join(pieces[0::2], pieces[1::2])
        mask = (types >= 0).astype(np.int64)
        inputs, targets = self.mask(ids, draws)
        columns = (inputs, mask, np.maximum(types, 0), targets)
        is_next = torch.tensor([int(follows) for _, _, follows in drawn])
        return (*(torch.from_numpy(column) for column in columns), is_next)

    def draw(self, passage: int, draws: np.random.Generator) -> tuple[str, str, bool]:
        """Two texts, and whether the second follows the first.

        1. Cut the passage between two of its sentences; one that has a single sentence goes on in the next passage.
        2. Every other time, and where nothing follows, the second is a part of another document.
        """
        passages = self.passages
        begin, end = passages.first[passage], passages.first[passage + 1]
        if end - begin > 1:
            cut = int(draws.integers(begin + 1, end))
        else:
            cut = int(end)
            goes_on = passage + 1 < len(passages) and (
                passages.document[passage + 1] == passages.document[passage]
            )
            end = passages.first[passage + 2] if goes_on else end
        first = passages.sentences(begin, cut)
        if cut < end and draws.random() < 0.5:
            return first, passages.sentences(cut, end), True
        other = passage
        for _ in range(TRIES):
            other = int(draws.integers(len(passages)))
            if passages.document[other] != passages.document[passage]:
                break
        begin, end = passages.first[other], passages.first[other + 1]
        return first, passages.sentences(int(draws.integers(begin, end)), end), False

    def join(
        self, firsts: list[list[int]], seconds: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Input ids, and for each the number of the text it is of, -1 for padding; the longer text gives way."""
        begin, separator, padding = map(self.tokenizer.token_to_id, ("[CLS]", "[SEP]", "[PAD]"))
        ids = np.full((len(firsts), self.length), padding, np.int64)
        types = np.full(ids.shape, -1, np.int64)
        room = self.length - 3
        for row, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            left = min(len(first), max(room // 2, room - len(second)))
            right = min(len(second), room - left)
            joined = [begin, *first[:left], separator, *second[:right], separator]
            ids[row, : len(joined)] = joined
            types[row, : left + 2] = 0
            types[row, left + 2 : len(joined)] = 1
        return ids, types

    def mask(
        self, ids: np.ndarray, draws: list[np.random.Generator]
    ) -> tuple[np.ndarray, np.ndarray]:
        """15 % of the tokens are to be guessed: 80 % of them read [MASK], 10 % a random token, 10 % stay."""
        special = [self.tokenizer.token_to_id(piece) for piece in ("[CLS]", "[SEP]", "[PAD]")]
        chance = np.stack([draw.random((2, self.length)) for draw in draws])
        random = np.stack(
            [draw.integers(self.tokenizer.get_vocab_size(), size=self.length) for draw in draws]
        )
        chosen = (chance[:, 0] < MASKED_SHARE) & ~np.isin(ids, special)
        as_mask = chosen & (chance[:, 1] < MASKED_AS_MASK)
        as_random = chosen & ~as_mask & (chance[:, 1] < MASKED_AS_MASK + MASKED_AS_RANDOM)
        inputs = np.where(as_mask, self.tokenizer.token_to_id("[MASK]"), ids)
        return np.where(as_random, random, inputs), np.where(chosen, ids, NOT_MASKED)
