from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.recipes.objectives.models import Says
from tests.recipes.objectives.sums import summarise
from thinwire.recipes.objectives.speech import Speech
from thinwire.recipes.objectives.transcripts import count_edits, decode_greedily

ALPHABET = "_AB "
KIND = Speech(features=2, alphabet=ALPHABET)


def saying(text: str, frames: int) -> Tensor:
    """Log-probabilities whose likeliest labels spell this text, one frame each, blanks behind it."""
    labels = torch.tensor([ALPHABET.index(letter) for letter in text.ljust(frames, "_")])
    return torch.nn.functional.one_hot(labels, len(ALPHABET)).float().mul(9).log_softmax(1)


@pytest.mark.parametrize(
    ("frames", "heard"),
    [("AAB", "AB"), ("A_AB", "AAB"), ("__A  _ B__", "A  B"), ("____", ""), ("BBBB", "B")],
)
def test_repetitions_merge_and_blanks_go(frames: str, heard: str) -> None:
    log_probs = saying(frames, len(frames))[None]
    assert decode_greedily(log_probs, torch.tensor([len(frames)]), ALPHABET) == [heard]


def test_frames_behind_the_end_are_not_read() -> None:
    assert decode_greedily(saying("ABAB", 4)[None], torch.tensor([2]), ALPHABET) == ["AB"]


@pytest.mark.parametrize(
    ("said", "meant", "edits"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("a", "a", 0)],
)
def test_edits(said: str, meant: str, edits: int) -> None:
    assert count_edits(said, meant) == edits
    assert count_edits(meant, said) == edits


def test_loss_is_that_of_all_alignments_per_utterance() -> None:
    """Two frames, one letter, all four labels alike: AA, A_ and _A say it, 3 of 16."""
    log_probs = torch.full((2, 2, 4), 0.25).log()
    batch = (
        torch.zeros(2, 2, 2),
        torch.tensor([2, 2]),
        torch.tensor([[1, 0], [1, 2]]),
        torch.tensor([1, 2]),
    )
    loss, carry = KIND.loss(Says((log_probs, torch.tensor([2, 2]))), batch, None)
    # The second can be said in one way only.
    assert loss.item() == pytest.approx((math.log(16 / 3) + math.log(16)) / 2)
    assert carry is None


def test_an_utterance_without_alignment_teaches_nothing() -> None:
    log_probs = torch.full((1, 2, 4), 0.25).log().requires_grad_()
    batch = (
        torch.zeros(1, 2, 2),
        torch.tensor([2]),
        torch.tensor([[1, 1]]),  # needs a blank in between
        torch.tensor([2]),
    )
    loss, _ = KIND.loss(Says((log_probs, torch.tensor([2]))), batch, None)
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad is not None
    assert not log_probs.grad.any()


def test_error_rates_are_over_all_words_and_letters() -> None:
    log_probs = torch.stack([saying("A B A", 6), saying("BB", 6)])
    said = [ALPHABET.index(letter) for letter in "A B"] + [0, 0]
    other = [ALPHABET.index(letter) for letter in "A A B"]
    batch = (
        torch.zeros(2, 6, 2),
        torch.tensor([6, 6]),
        torch.tensor([said, other]),
        torch.tensor([3, 5]),
    )
    totals, _ = KIND.measure(Says((log_probs, torch.tensor([5, 2]))), batch, None)
    # "A B A" for "A B": one word and two letters too many. "B" for "A A B": two words and four letters missing.
    assert summarise(KIND, totals) == {"wer": 3 / 5, "cer": 6 / 8}
