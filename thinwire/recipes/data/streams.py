"""Streams: a long text as one row of tokens, cut into windows for language models.

A recurrent model carries its state from step to step, so its windows must follow each other. The text is cut into as many streams as
there are examples in a step, and every step takes the next window of each. A model that forgets is better served with windows
in random order (`Windows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.recipes.examples import Batch, Examples, count_steps, send, split

TEST_STREAMS = 16
"""A test text is read in so many streams, whatever the number of workers: perplexity does not depend on it."""


def cut(tokens: Tensor, starts: Tensor, size: int) -> Batch:
    """The windows that begin at these places, and the token that follows each of theirs."""
    starts = send(starts, tokens.device)
    window = tokens[starts[:, None] + torch.arange(size + 1, device=tokens.device)].long()
    return window[:, :-1], window[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Text(Examples):
    """Tokens [N], read in windows of `length`."""

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        """Whole windows."""
        return (len(self.tokens) - 1) // self.length

    def batches(
        self, indices: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> list[Batch]:
        # Nothing is drawn, and all windows of a training text are of one length.
        return split(self.batch(torch.cat(list(indices)), None), [len(i) for i in indices])

    def to(self, device: torch.device) -> Text:
        return replace(self, tokens=self.tokens.to(device))


class Streams(Text):
    """A text to learn from; a place is where a window begins."""

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        return cut(self.tokens, index, self.length)

    def deal(
        self, *, seed: int, epoch: int, rank: int, world: int, batch_size: int
    ) -> list[Tensor]:
        """World x batch size streams of equal length; step s takes the window s of each of this rank's streams.

        The same in every epoch: which token follows which is not to be shuffled.
        """
        steps = count_steps(len(self), world, batch_size)
        stream = (len(self.tokens) - 1) // (world * batch_size)
        starts = (rank * batch_size + torch.arange(batch_size)) * stream
        return [starts + step * self.length for step in range(steps)]


class WholeText(Text):
    """A text to test on, from beginning to end; at most TEST_STREAMS - 1 tokens at the very end are left out."""

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    @property
    def stream(self) -> int:
        """Tokens of each stream."""
        return (len(self.tokens) - 1) // min(TEST_STREAMS, len(self))

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        """Windows at the same place of their streams; the last one of a stream is shorter."""
        left = self.stream - int(index[0]) % self.stream
        return cut(self.tokens, index, min(self.length, left))

    def deal_test(self, *, rank: int, world: int, batch_size: int) -> list[Tensor]:
        """The streams are dealt out to the ranks, so that what a model carries along stays with its stream.

        All of a rank's streams go on together, however small the batch is in training.
        """
        starts = torch.arange(min(TEST_STREAMS, len(self)))[rank::world] * self.stream
        if len(starts) == 0:
            return []
        return [starts + begin for begin in range(0, self.stream, self.length)]


class Windows(Text):
    """Windows that do not overlap; a place is the number of a window."""

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        return cut(self.tokens, index * self.length, self.length)
