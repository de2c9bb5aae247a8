"""AN4: 948 + 130 short utterances of letters, digits and commands, as features of any width with their transcripts.

One npz file: `{train,test}_feat` [all frames, width], `{train,test}_len` frames of each utterance, `{train,test}_text`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.recipes.data.source import damaged, locate, reading
from thinwire.recipes.data.synthetic import make_speech
from thinwire.recipes.data.utterances import Utterances
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.objectives.speech import Speech

ALPHABET = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""The blank first, as in the published job."""
SPECTROGRAM = 161
"""Width of the published job's features: a spectrogram of 20 ms windows at 16 kHz."""
TINY_WIDTH = 13
FRAMES, LETTERS = 400, 24
"""Of a synthetic utterance: about the longer ones of the real set."""
TINY_FRAMES, TINY_LETTERS = 48, 6


def load(options: DataOptions) -> Data:
    if options.synthetic:
        if options.tiny:
            kind = Speech(features=TINY_WIDTH, alphabet=ALPHABET)
            return make_speech(kind, TINY_FRAMES, TINY_LETTERS, options)
        return make_speech(
            Speech(features=SPECTROGRAM, alphabet=ALPHABET), FRAMES, LETTERS, options
        )
    (path,) = locate("an4", options).paths
    with reading(path, "a file of AN4 features"), np.load(path, allow_pickle=False) as arrays:
        train, test = (read_part(path, arrays, part) for part in ("train", "test"))
    if train.frames.shape[1] != test.frames.shape[1]:
        raise damaged(path, "its train and test frames differ in width")
    return Data(Speech(features=train.frames.shape[1], alphabet=ALPHABET), train, test)


def read_part(path: Path, arrays: Any, part: str) -> Utterances:
    frames = torch.from_numpy(arrays[f"{part}_feat"].astype(np.float32))
    lengths = torch.from_numpy(arrays[f"{part}_len"].astype(np.int64))
    texts = [str(text).upper() for text in arrays[f"{part}_text"]]
    if frames.dim() != 2 or lengths.sum() != len(frames) or len(texts) != len(lengths):
        raise damaged(
            path,
            f"{part} has {list(frames.shape)} frames, lengths for {int(lengths.sum())} "
            f"and {len(texts)} transcripts of {len(lengths)}",
        )
    unknown = set("".join(texts)) - set(ALPHABET[1:])
    if unknown:
        raise damaged(path, f"a transcript has {min(unknown)!r}, which is not in the alphabet")
    letters = [ALPHABET.index(letter) for text in texts for letter in text]
    return Utterances(
        frames=normalise(frames, lengths),
        lengths=lengths,
        letters=torch.tensor(letters),
        letter_counts=torch.tensor([len(text) for text in texts]),
    )


def normalise(frames: Tensor, lengths: Tensor) -> Tensor:
    """Zero mean and unit variance of every feature over each utterance: voices and microphones differ."""
    parts = []
    for utterance in frames.split(lengths.tolist()):
        std, mean = torch.std_mean(utterance, dim=0, correction=0)
        parts.append((utterance - mean) / std.clamp(min=1e-5))
    return torch.cat(parts)
