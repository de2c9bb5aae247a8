"""Synthetic data: random examples of the right shape, the same in every process and every run.

Enough for a few steps of many workers, and no more: what is measured with it is speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.recipes.data.groups import Groups
from thinwire.recipes.data.pixels import Normalisation, Pixels
from thinwire.recipes.data.streams import Streams, WholeText, Windows
from thinwire.recipes.data.utterances import Utterances
from thinwire.recipes.examples import Batch, Data, DataOptions, Examples, TensorExamples
from thinwire.recipes.objectives.images import Images
from thinwire.recipes.objectives.pretraining import NOT_MASKED, Pretraining
from thinwire.recipes.objectives.questions import NOT_CONTEXT, Questions, Reference
from thinwire.recipes.objectives.speech import Speech
from thinwire.recipes.objectives.tokens import Tokens

TRAIN_EXAMPLES = 2048
TINY_TRAIN_EXAMPLES = 768
"""Three steps of two workers at a batch of 128."""
TEST_EXAMPLES = 64
TINY_TEST_EXAMPLES = 16
TINY_VOCABULARY = 128
DRAWN_BYTES = 1 << 26
"""Images beyond that are repetitions of those before."""
DRAWN_UTTERANCES = 128
"""Utterances beyond that are, too."""
MASKED_SHARE = 0.15


@dataclass(frozen=True)
class Repeated(Examples):
    """`count` examples out of fewer."""

    few: Examples
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, index: Tensor, generator: torch.Generator | None) -> Batch:
        return self.few.batch(index % len(self.few), generator)

    def batches(
        self, indices: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> list[Batch]:
        return self.few.batches([index % len(self.few) for index in indices], generators)

    def to(self, device: torch.device) -> Repeated:
        return Repeated(self.few.to(device), self.count)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def sizes(options: DataOptions) -> tuple[int, int]:
    """Examples to learn from and to test on."""
    if options.tiny:
        return TINY_TRAIN_EXAMPLES, TINY_TEST_EXAMPLES
    return TRAIN_EXAMPLES, TEST_EXAMPLES


def make_images(
    kind: Images,
    normalisation: Normalisation,
    options: DataOptions,
    padding: int = 0,
    flip: bool = False,
) -> Data:
    """Noise, cropped and flipped as the real images are."""
    generator = seeded()
    image = (kind.channels, kind.height, kind.width)
    drawn = DRAWN_BYTES // (kind.channels * kind.height * kind.width)
    train, test = (
        Pixels(
            images=torch.randint(
                256, (min(count, drawn), *image), generator=generator, dtype=torch.uint8
            ),
            labels=torch.randint(kind.classes, (min(count, drawn),), generator=generator),
            normalisation=normalisation,
            padding=padding,
            flip=flip,
        )
        for count in sizes(options)
    )
    return Data(kind, Repeated(train, sizes(options)[0]), Repeated(test, sizes(options)[1]))


def make_tokens(kind: Tokens, options: DataOptions, shuffled: bool = False) -> Data:
    """Tokens that follow each other by chance, as streams or as windows in random order."""
    generator = seeded()
    train, test = (
        torch.randint(
            kind.vocabulary, (count * kind.length + 1,), generator=generator, dtype=torch.int32
        )
        for count in sizes(options)
    )
    if shuffled:
        return Data(
            kind,
            Windows(tokens=train, length=kind.length),
            Windows(tokens=test, length=kind.length),
        )
    return Data(
        kind, Streams(tokens=train, length=kind.length), WholeText(tokens=test, length=kind.length)
    )


def make_questions(vocabulary: int, length: int, options: DataOptions) -> Data:
    """Windows of which the first quarter is the question; every test question has two and any words for an answer."""
    generator = seeded()
    train, test = sizes(options)
    text = "one two three four"
    answers = [(0, 3), (4, 7), (8, 13), (14, 18)]
    references = tuple(
        Reference(context=text, answers=(text[slice(*answers[i % 4])],)) for i in range(test)
    )
    asked = length // 4
    ids, mask, types = make_pairs(vocabulary, length, asked, train + 2 * test, generator)
    spans = torch.randint(asked, length, (train, 2), generator=generator).sort(1).values
    offsets = torch.full((2 * test, length, 2), NOT_CONTEXT)
    words = torch.tensor(answers)[torch.arange(length - asked - 1) % 4]
    offsets[:, asked:-1] = words
    return Data(
        Questions(vocabulary=vocabulary, length=length, references=references),
        TensorExamples((ids[:train], mask[:train], types[:train], spans[:, 0], spans[:, 1])),
        Groups(
            columns=(
                ids[train:],
                mask[train:],
                types[train:],
                torch.arange(test).repeat_interleave(2),
                offsets,
            ),
            first=2 * torch.arange(test + 1),
        ),
    )


def make_pretraining(kind: Pretraining, options: DataOptions) -> Data:
    """Pairs of sentences of equal length, a share of whose tokens is to be guessed."""
    generator = seeded()
    parts = []
    for count in sizes(options):
        ids, mask, types = make_pairs(
            kind.vocabulary, kind.length, kind.length // 2, count, generator
        )
        masked = torch.rand(ids.shape, generator=generator) < MASKED_SHARE
        targets = torch.where(masked, ids, NOT_MASKED)
        is_next = torch.randint(2, (count,), generator=generator)
        parts.append(TensorExamples((ids, mask, types, targets, is_next)))
    return Data(kind, *parts)


def make_pairs(
    vocabulary: int, length: int, first: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, attention mask and token types of pairs whose first part has `first` tokens."""
    ids = torch.randint(vocabulary, (count, length), generator=generator)
    types = (torch.arange(length) >= first).long().expand(count, length)
    return ids, torch.ones_like(ids), types.contiguous()


def make_speech(kind: Speech, frames: int, letters: int, options: DataOptions) -> Data:
    """Utterances of `frames` down to half of that, with transcripts of `letters` down to half."""
    generator = seeded()
    parts = []
    for count in sizes(options):
        drawn = min(count, DRAWN_UTTERANCES)
        lengths = torch.randint(frames // 2, frames + 1, (drawn,), generator=generator)
        spoken = torch.randint(letters // 2, letters + 1, (drawn,), generator=generator)
        few = Utterances(
            frames=torch.randn(int(lengths.sum()), kind.features, generator=generator),
            lengths=lengths,
            letters=torch.randint(1, len(kind.alphabet), (int(spoken.sum()),), generator=generator),
            letter_counts=spoken,
        )
        parts.append(Repeated(few, count))
    return Data(kind, *parts)
