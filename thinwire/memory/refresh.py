"""Refresh: how the second moment that a memory divides by learns on after a dense start."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.described import Described
from thinwire.validate import check_choice, check_positive_int

MOST_COUNTED = 20
"""A refresh counts for as many of AdamW's steps as it stands for, up to this."""


@dataclass(frozen=True)
class Refresh(Described):
    """The second moment learns on after the dense start: from the mean of the raw gradients, every few steps.

    The mean is exchanged beside what is sent, and only for this: the gradients themselves travel through momentum as ever.
    """

    every: int = 50
    """Exchanges from one refresh to the next; the first comes so many after the dense start."""
    bits: int = 8
    """Of every element of the gradients on the way: 8 (in blocks of 128), 16 or 32."""
    counts_for: int | None = None
    """How many of AdamW's steps one refresh stands for: v keeps beta2 to the power of this. None = `every`, at most 20."""

    def __post_init__(self) -> None:
        check_positive_int("every", self.every)
        check_choice("bits", self.bits, (8, 16, 32))
        if self.counts_for is not None:
            check_positive_int("counts_for", self.counts_for)

    @property
    def steps(self) -> int:
        return min(self.every, MOST_COUNTED) if self.counts_for is None else self.counts_for
