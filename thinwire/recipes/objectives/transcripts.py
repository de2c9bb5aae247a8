"""Transcripts of speech: how they are read off a model, and how far they are from what was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

BLANK = 0
"""CTC's label for "nothing new"; the first place of every alphabet."""

Symbol = TypeVar("Symbol")


def decode_greedily(log_probs: Tensor, lengths: Tensor, alphabet: str) -> list[str]:
    """The likeliest label of every frame, repetitions merged and blanks left out."""
    best = log_probs.argmax(2).tolist()
    texts = []
    for labels, length in zip(best, lengths.tolist(), strict=True):
        before = [BLANK, *labels[: length - 1]]
        heard = [
            now
            for now, then in zip(labels[:length], before[:length], strict=True)
            if now not in (BLANK, then)
        ]
        texts.append("".join(alphabet[label] for label in heard))
    return texts


def count_edits(said: Sequence[Symbol], meant: Sequence[Symbol]) -> int:
    """Least number of insertions, deletions and substitutions that turn one into the other (Levenshtein)."""
    row = list(range(len(meant) + 1))
    for i, symbol in enumerate(said, start=1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(meant, start=1):
            diagonal, row[j] = (
                row[j],
                min(row[j] + 1, row[j - 1] + 1, diagonal + (symbol != wanted)),
            )
    return row[-1]
