"""Answers to questions, judged as SQuAD's official evaluation (v1.1) does."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and spare white space, in the official order."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is one of the answers up to `normalise`, else 0."""
    return float(any(normalise(prediction) == normalise(answer) for answer in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, with the answer it fits best."""
    return max(_f1_with(prediction, answer) for answer in answers)


def _f1_with(prediction: str, answer: str) -> float:
    said, wanted = normalise(prediction).split(), normalise(answer).split()
    shared = sum((Counter(said) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
