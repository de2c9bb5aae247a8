from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.recipes.data import official
from thinwire.errors import UsageError
from thinwire.recipes.data import an4
from thinwire.recipes.data.utterances import Utterances
from thinwire.recipes.examples import DataOptions


@pytest.mark.parametrize("width", [13, 161])
def test_utterances_are_normalised_and_padded(width: int, tmp_path: Path) -> None:
    official.write_an4(tmp_path, width)
    data = an4.load(DataOptions(data_dir=tmp_path))
    assert data.kind == an4.Speech(features=width, alphabet=an4.ALPHABET)
    arrays = np.load(tmp_path / "an4" / "features.npz")
    index = torch.tensor([3, 47, 0])
    frames, lengths, targets, target_lengths = data.train.batch(index, None)
    assert lengths.tolist() == arrays["train_len"][index.numpy()].tolist()
    assert frames.shape == (3, int(lengths.max()), width)
    for row, place in enumerate(index.tolist()):
        length = int(lengths[row])
        begin = int(arrays["train_len"][:place].sum())
        original = torch.from_numpy(arrays["train_feat"][begin : begin + length]).float()
        expected = (original - original.mean(0)) / original.std(0, correction=0)
        torch.testing.assert_close(frames[row, :length], expected)
        assert not frames[row, length:].any()
        letters = targets[row, : int(target_lengths[row])].tolist()
        assert "".join(an4.ALPHABET[letter] for letter in letters) == arrays["train_text"][place]
        assert not targets[row, int(target_lengths[row]) :].any()


def test_padding_at_the_end_of_everything() -> None:
    """The last utterance is the shortest of its batch: there is nothing behind it to read."""
    utterances = Utterances(
        frames=torch.arange(1.0, 6.0)[:, None],
        lengths=torch.tensor([4, 1]),
        letters=torch.tensor([1, 2, 3]),
        letter_counts=torch.tensor([3, 0]),
    )
    frames, _, letters, _ = utterances.batch(torch.tensor([1, 0]), None)
    assert frames[..., 0].tolist() == [[5, 0, 0, 0], [1, 2, 3, 4]]
    assert letters.tolist() == [[0, 0, 0], [1, 2, 3]]


def rewrite(folder: Path, **changes: np.ndarray) -> None:
    arrays = dict(np.load(folder / "an4" / "features.npz"))
    np.savez(folder / "an4" / "features.npz", **{**arrays, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_len": np.array([5])},
            r"train has \[.*\] frames, lengths for 5 and 48 transcripts",
        ),
        ({"test_text": np.array(["3"] * 12)}, "a transcript has '3', which is not in the alphabet"),
        ({"test_feat": np.zeros((5, 2)), "test_len": np.full(12, 0)}, "test has"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    changes: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    official.write_an4(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        an4.load(DataOptions(data_dir=tmp_path))


def test_what_is_no_npz_file_is_one_sentence(tmp_path: Path) -> None:
    official.write_bytes(tmp_path / "an4" / "broken.npz", b"PK no zip")
    with pytest.raises(UsageError, match=r"broken.npz is damaged .* it is not a file of AN4"):
        an4.load(DataOptions(data_dir=tmp_path))
