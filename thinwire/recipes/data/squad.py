"""SQuAD v1.1: questions about paragraphs of Wikipedia, in windows of BERT's word pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from thinwire.recipes.data.groups import Groups
from thinwire.recipes.data.source import damaged, locate, reading
from thinwire.recipes.data.synthetic import TINY_VOCABULARY, make_questions
from thinwire.recipes.data.vocabularies import BERT_VOCABULARY, read_word_pieces
from thinwire.recipes.examples import Batch, Data, DataOptions
from thinwire.recipes.objectives.questions import NOT_CONTEXT, Questions, Reference


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a text is cut into windows: [CLS] question [SEP] piece of the text [SEP]."""

    length: int = 384
    stride: int = 128
    """Tokens from the beginning of one piece to that of the next."""
    question: int = 64
    """A longer question is cut."""


SHORT_CUT = Cut(length=256)
TINY_CUT = Cut(length=64, stride=16, question=16)


@dataclass(frozen=True, kw_only=True)
class Question:
    """As it stands in the file."""

    text: str
    context: int
    """Which of the file's paragraphs it is about."""
    answers: tuple[str, ...]
    begin: int
    """The character of the context at which the first answer begins."""


@dataclass(frozen=True)
class Pieces:
    """The word pieces of a text, and the characters that each covers."""

    ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Window:
    """The word pieces `begin` up to `end` of the context of a question."""

    question: int
    begin: int
    end: int


def load(full_cut: Cut, test_every: int, options: DataOptions) -> Data:
    """All questions to learn from, and every so many of those to test on."""
    cut = TINY_CUT if options.tiny else full_cut
    if options.synthetic:
        vocabulary = TINY_VOCABULARY if options.tiny else BERT_VOCABULARY
        return make_questions(vocabulary, cut.length, options)
    train_path, test_path = locate("squad", options).paths
    (vocabulary_path,) = locate("bert-vocabulary", options).paths
    tokenizer = read_word_pieces(vocabulary_path)
    train = Paper(train_path, tokenizer, cut)
    test = Paper(test_path, tokenizer, cut, test_every)
    every_window = torch.arange(len(train.windows) + 1)
    kind = Questions(
        vocabulary=tokenizer.get_vocab_size(), length=cut.length, references=test.references()
    )
    return Data(
        kind,
        Groups(columns=(*train.inputs(), *train.spans()), first=every_window),
        Groups(columns=(*test.inputs(), *test.offsets()), first=test.first_windows()),
    )


load_squad = partial(load, Cut(), 1)
load_squad_short = partial(load, SHORT_CUT, 5)


class Paper:
    """A file of questions, or every so many of them, tokenised and cut into windows."""

    def __init__(self, path: Path, tokenizer: Any, cut: Cut, every: int = 1) -> None:
        self.cut = cut
        self.contexts, questions = read_questions(path)
        self.questions = questions[::every]
        self.told = tokenise(tokenizer, self.contexts)
        self.asked = tokenise(tokenizer, [question.text for question in self.questions])
        self.separators = [tokenizer.token_to_id(piece) for piece in ("[CLS]", "[SEP]", "[PAD]")]
        self.windows = list(self._cut_windows())

    def _cut_windows(self) -> Iterator[Window]:
        for number, question in enumerate(self.questions):
            total = len(self.told[question.context].ids)
            room = self.cut.length - self._first_place(number) - 1
            begin = 0
            while begin + room < total:
                yield Window(number, begin, begin + room)
                begin += self.cut.stride
            yield Window(number, begin, total)

    def _first_place(self, question: int) -> int:
        """Where the context begins in the windows of a question: after [CLS] question [SEP]."""
        return min(len(self.asked[question].ids), self.cut.question) + 2

    def inputs(self) -> Batch:
        """Input ids, attention mask and token types of every window."""
        begin, separator, padding = self.separators
        ids = np.full((len(self.windows), self.cut.length), padding, np.int32)
        mask, types = (np.zeros(ids.shape, np.int8) for _ in range(2))
        for row, window in enumerate(self.windows):
            first = self._first_place(window.question)
            last = first + window.end - window.begin
            ids[row, 0] = begin
            ids[row, 1 : first - 1] = self.asked[window.question].ids[: first - 2]
            ids[row, first - 1] = ids[row, last] = separator
            context = self.told[self.questions[window.question].context]
            ids[row, first:last] = context.ids[window.begin : window.end]
            mask[row, : last + 1] = 1
            types[row, first : last + 1] = 1
        return tuple(torch.from_numpy(column) for column in (ids, mask, types))

    def spans(self) -> Batch:
        """First and last word piece of the first answer in every window; 0 and 0 where it does not hold all of it."""
        spans = np.zeros((2, len(self.windows)), np.int32)
        for row, window in enumerate(self.windows):
            question = self.questions[window.question]
            offsets = self.told[question.context].offsets
            end = question.begin + len(question.answers[0])
            start_piece = int(np.searchsorted(offsets[:, 1], question.begin, side="right"))
            end_piece = int(np.searchsorted(offsets[:, 0], end)) - 1
            if window.begin <= start_piece <= end_piece < window.end:
                shift = self._first_place(window.question) - window.begin
                spans[:, row] = start_piece + shift, end_piece + shift
        return tuple(torch.from_numpy(column) for column in spans)

    def offsets(self) -> Batch:
        """The question of every window, and which characters of the context each of its word pieces covers."""
        shape = (len(self.windows), self.cut.length, 2)
        offsets = np.full(shape, NOT_CONTEXT, np.int32)
        for row, window in enumerate(self.windows):
            first = self._first_place(window.question)
            context = self.told[self.questions[window.question].context]
            piece = context.offsets[window.begin : window.end]
            offsets[row, first : first + len(piece)] = piece
        question = torch.tensor([window.question for window in self.windows], dtype=torch.int32)
        return question, torch.from_numpy(offsets)

    def first_windows(self) -> Tensor:
        """[questions + 1]: where the windows of each question begin."""
        per_question = torch.bincount(torch.tensor([window.question for window in self.windows]))
        return functional.pad(per_question.cumsum(0), (1, 0))

    def references(self) -> tuple[Reference, ...]:
        return tuple(
            Reference(context=self.contexts[question.context], answers=question.answers)
            for question in self.questions
        )


def read_questions(path: Path) -> tuple[list[str], list[Question]]:
    """The paragraphs of a file, and the questions about them in its order."""
    contexts: list[str] = []
    questions: list[Question] = []
    with reading(path, "a file of SQuAD v1.1"):
        for article in json.loads(path.read_text("utf-8"))["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    if not answers:
                        raise ValueError(f"question {asked['id']} has no answer, as in SQuAD v2")
                    questions.append(
                        Question(
                            text=asked["question"],
                            context=len(contexts),
                            answers=answers,
                            begin=asked["answers"][0]["answer_start"],
                        )
                    )
                contexts.append(paragraph["context"])
    if not questions:
        raise damaged(path, "it asks nothing")
    return contexts, questions


def tokenise(tokenizer: Any, texts: Sequence[str]) -> list[Pieces]:
    return [
        Pieces(
            np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)
        )
        for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ]
