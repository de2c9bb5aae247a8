from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.recipes.objectives.models import Says
from tests.recipes.objectives.sums import summarise
from thinwire.recipes.objectives.answers import exact_match, f1, normalise
from thinwire.recipes.objectives.questions import (
    LONGEST_ANSWER,
    NOT_CONTEXT,
    Questions,
    Reference,
    best_spans,
)

CONTEXT = "In 1066 the Normans won."
#          [CLS] when? [SEP] In      1066    the      Normans   won       .
OFFSETS = [NOT_CONTEXT] * 3, [(0, 2), (3, 7), (8, 11), (12, 19), (20, 23), (23, 24)]
LENGTH = 9


def make_offsets() -> Tensor:
    outside, inside = OFFSETS
    return torch.tensor([[(place, place) for place in outside] + inside])


def peak(place: int, height: float = 5.0) -> Tensor:
    logits = torch.zeros(1, LENGTH)
    logits[0, place] = height
    return logits


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("The  Normans!", "normans"),
        ("an apple, a pear", "apple pear"),
        ("theatre", "theatre"),
        ("U.S.", "us"),
        ("the", ""),
    ],
)
def test_answers_are_normalised_as_officially(said: str, wanted: str) -> None:
    assert normalise(said) == wanted


def test_scores_take_the_answer_that_fits_best() -> None:
    answers = ["the blue house", "a very blue big house"]
    assert exact_match("Blue house.", answers) == 1.0
    assert exact_match("green house", answers) == 0.0
    # One of two words shared with "blue house"; one of two and one of four with "very blue big house".
    assert f1("green house", answers) == pytest.approx(0.5)
    # Every word said is wanted, and three of the four wanted are said.
    assert f1("very big house", answers) == pytest.approx(2 * 1 * 0.75 / 1.75)
    assert f1("cat", answers) == 0.0


def test_repeated_words_count_as_often_as_they_occur() -> None:
    assert f1("new new new", ["new york new"]) == pytest.approx(2 / 3)


def test_loss_is_the_mean_of_both_ends() -> None:
    flat = torch.zeros(1, LENGTH)
    steep = torch.full((1, LENGTH), -math.inf)
    steep[0, 2] = 0.0
    batch = (torch.zeros(1, LENGTH).long(),) * 3 + (torch.tensor([1]), torch.tensor([2]))
    kind = Questions(vocabulary=10, length=LENGTH)
    loss, _ = kind.loss(Says((flat, steep)), batch, None)
    assert loss.item() == pytest.approx(math.log(LENGTH) / 2)


def test_the_best_span_is_in_the_context_and_in_order() -> None:
    scores, spans = best_spans(peak(4), peak(6), make_offsets())
    assert (scores.item(), spans.tolist()) == (10.0, [[3, 19]])
    # The highest start is in the question, and the highest end before the best start that remains.
    start = peak(1, 100.0) + peak(6)
    end = peak(3, 4.0) + peak(7, 3.0)
    scores, spans = best_spans(start, end, make_offsets())
    assert (scores.item(), spans.tolist()) == (8.0, [[12, 23]])


def test_no_span_is_longer_than_allowed() -> None:
    length = LONGEST_ANSWER + 10
    offsets = torch.stack([torch.arange(length), torch.arange(length) + 1], dim=1)[None]
    start, end = torch.zeros(1, length), torch.zeros(1, length)
    start[0, 0], end[0, LONGEST_ANSWER], end[0, LONGEST_ANSWER - 1] = 9.0, 9.0, 1.0
    scores, spans = best_spans(start, end, offsets)
    assert (scores.item(), spans.tolist()) == (10.0, [[0, LONGEST_ANSWER]])


def test_a_window_without_context_gives_an_empty_span() -> None:
    scores, spans = best_spans(peak(1), peak(1), torch.full((1, LENGTH, 2), NOT_CONTEXT))
    assert (scores.item(), spans.tolist()) == (-math.inf, [[0, 0]])


def test_a_question_is_answered_by_its_best_window() -> None:
    references = (
        Reference(context="unused", answers=("unused",)),
        Reference(context=CONTEXT, answers=("1066", "in 1066")),
        Reference(context=CONTEXT, answers=("the Normans won",)),
    )
    kind = Questions(vocabulary=10, length=LENGTH, references=references)
    start = torch.cat([peak(7), peak(4, 6.0), peak(5)])
    end = torch.cat([peak(7), peak(4, 6.0), peak(6)])
    ids = torch.zeros(3, LENGTH).long()
    question = torch.tensor([1, 1, 2])
    batch = (ids, ids, ids, question, make_offsets().expand(3, -1, -1))
    totals, _ = kind.measure(Says((start, end)), batch, None)
    # "1066" of the second window, and "the Normans", which lacks one of two words.
    assert summarise(kind, totals) == {"f1": pytest.approx((1 + 2 / 3) / 2), "em": 0.5}
