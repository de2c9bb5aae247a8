"""Kinds of data as the published jobs have them, small ones of the same make, and random batches of each."""

from __future__ import annotations

import torch

from thinwire.recipes.examples import Batch
from thinwire.recipes.kinds import Kind
from thinwire.recipes.objectives.images import Images
from thinwire.recipes.objectives.pretraining import NOT_MASKED, Pretraining
from thinwire.recipes.objectives.questions import Questions, Reference
from thinwire.recipes.objectives.speech import Speech
from thinwire.recipes.objectives.tokens import Tokens

CIFAR10 = Images(channels=3, height=32, width=32, classes=10)
CIFAR100 = Images(channels=3, height=32, width=32, classes=100)
IMAGENET = Images(channels=3, height=224, width=224, classes=1000)
MNIST = Images(channels=1, height=28, width=28, classes=10)
WORDS = Tokens(vocabulary=33278, length=70)
PIECES = Tokens(vocabulary=50257, length=1024)
SQUAD = Questions(vocabulary=30522, length=384)
WIKIPEDIA = Pretraining(vocabulary=30522, length=128)
AN4 = Speech(features=161, alphabet="_'ABCDEFGHIJKLMNOPQRSTUVWXYZ ")

REFERENCE = Reference(context="one two three four", answers=("two", "two three"))
SMALL: dict[str, Kind] = {
    "images": Images(channels=3, height=64, width=64, classes=7),
    "tokens": Tokens(vocabulary=50, length=12),
    "questions": Questions(vocabulary=50, length=12, references=(REFERENCE,) * 4),
    "pretraining": Pretraining(vocabulary=50, length=12),
    "speech": Speech(features=13, alphabet="_ABC "),
}


def draw(kind: Kind, *, test: bool = False, size: int = 4) -> Batch:
    """A random batch to learn from, or to test on."""
    match kind:
        case Images():
            images = torch.randn(size, kind.channels, kind.height, kind.width)
            return images, torch.randint(kind.classes, (size,))
        case Tokens():
            tokens = torch.randint(kind.vocabulary, (size, kind.length + 1))
            return tokens[:, :-1], tokens[:, 1:]
        case Speech():
            lengths = torch.arange(20, 20 + size)
            letters = torch.randint(1, len(kind.alphabet), (size, 5))
            return (
                torch.randn(size, int(lengths.max()), kind.features),
                lengths,
                letters,
                torch.full((size,), 5),
            )
    assert isinstance(kind, Questions | Pretraining)
    ids = torch.randint(kind.vocabulary, (size, kind.length))
    mask = torch.ones_like(ids)
    mask[0, kind.length // 2 :] = 0
    types = torch.zeros_like(ids)
    if isinstance(kind, Pretraining):
        targets = torch.where(torch.rand(ids.shape) < 0.3, ids, NOT_MASKED)
        return ids, mask, types, targets, torch.randint(2, (size,))
    if test:
        begins = torch.arange(kind.length)
        offsets = torch.stack([begins, begins + 1], dim=1).expand(size, -1, -1)
        return ids, mask, types, torch.arange(size) // 2, offsets
    return ids, mask, types, *torch.randint(kind.length, (2, size))
