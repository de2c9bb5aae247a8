from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.recipes.data import official
from thinwire.errors import UsageError
from thinwire.recipes.data import chars, wikitext
from thinwire.recipes.data.streams import TEST_STREAMS, Streams, WholeText, Windows
from thinwire.recipes.examples import DataOptions

# -- streams ---------------------------------------------------------------------------------------------------


def test_streams_go_on_from_step_to_step_and_share_out_the_text() -> None:
    examples = Streams(tokens=torch.arange(1003, dtype=torch.int32), length=10)
    seen = []
    for rank in range(2):
        steps = examples.deal(seed=0, epoch=0, rank=rank, world=2, batch_size=3)
        assert len(steps) == len(examples) // 6 == 16
        batches = [examples.batch(index, None) for index in steps]
        for (inputs, targets), (following, _) in pairwise(batches):
            assert inputs.shape == targets.shape == (3, 10)
            assert torch.equal(targets, inputs + 1)
            assert torch.equal(following[:, 0], targets[:, -1])
        seen += [inputs.flatten() for inputs, _ in batches]
    places = torch.cat(seen)
    assert len(places.unique()) == len(places)


def test_too_small_a_text_is_one_sentence() -> None:
    examples = Streams(tokens=torch.arange(50), length=10)
    with pytest.raises(UsageError, match="batch_size is 3 on 2 workers"):
        examples.deal(seed=0, epoch=0, rank=0, world=2, batch_size=3)


@pytest.mark.parametrize("count", [33, 177, 1003, 16 * 40 + 1])
@pytest.mark.parametrize("world", [1, 3, 20])
def test_a_test_text_is_read_once_whatever_the_world(count: int, world: int) -> None:
    examples = WholeText(tokens=torch.arange(count), length=16)
    predicted = []
    for rank in range(world):
        shares = examples.deal_test(rank=rank, world=world, batch_size=2)
        batches = [examples.batch(index, None) for index in shares]
        assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches)
        for (_, targets), (following, _) in pairwise(batches):
            assert torch.equal(following[:, 0], targets[:, -1])
        predicted += [targets.flatten() for _, targets in batches]
    found = torch.cat(predicted)
    assert len(found.unique()) == len(found) > count - 1 - TEST_STREAMS


def test_windows_do_not_overlap_and_are_shuffled() -> None:
    examples = Windows(tokens=torch.arange(101), length=10)
    (index,) = examples.deal(seed=0, epoch=0, rank=0, world=1, batch_size=10)
    inputs, targets = examples.batch(index, None)
    assert inputs[:, 0].tolist() != sorted(inputs[:, 0].tolist())
    assert sorted(inputs.flatten().tolist()) == list(range(100))
    assert torch.equal(targets, inputs + 1)


# -- WikiText --------------------------------------------------------------------------------------------------


def write_words(folder: Path, train: str, test: str) -> None:
    for part, text in (("train", train), ("valid", train), ("test", test)):
        official.write_text(folder / "wikitext-2" / f"wiki.{part}.tokens", text)


def test_words_and_line_ends_are_numbered(tmp_path: Path) -> None:
    write_words(tmp_path, " \n the king <unk> \n" * 30, " the queen king \n" * 30)
    data = wikitext.load_wikitext2(DataOptions(data_dir=tmp_path))
    assert isinstance(data.train, Streams)
    assert isinstance(data.test, WholeText)
    assert data.kind == wikitext.Tokens(vocabulary=4, length=70)
    assert data.train.tokens[:6].tolist() == [1, 2, 3, 0, 1, 1]
    # The queen is unknown: she is not in the training text.
    assert data.test.tokens[:5].tolist() == [2, 0, 3, 1, 2]


def test_short_names_are_as_good(tmp_path: Path) -> None:
    official.write_wikitext2(tmp_path / "one")
    official.write_wikitext(tmp_path / "other", "wikitext-2", "{}.txt")
    one, other = (
        wikitext.load_wikitext2(DataOptions(data_dir=tmp_path / name)) for name in ("one", "other")
    )
    assert torch.equal(one.train.tokens, other.train.tokens)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"too short\n", "must hold more than 70 tokens, one window, but has 3"),
        (b"\xff\xfe\x00\n", "it is not text in UTF-8"),
    ],
)
def test_what_is_no_text_is_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    official.write_wikitext2(tmp_path)
    (tmp_path / "wikitext-2" / "wiki.test.tokens").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        wikitext.load_wikitext2(DataOptions(data_dir=tmp_path))


def test_byte_pairs_are_the_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    official.write_wikitext2_gpt2(tmp_path)
    data = wikitext.load_wikitext2_gpt2(DataOptions(data_dir=tmp_path, tiny=True))
    assert isinstance(data.train, Windows)
    assert data.kind == wikitext.Tokens(vocabulary=258, length=32)
    paths = [tmp_path / "gpt2-bpe" / name for name in ("vocab.json", "merges.txt")]
    tokenizer = wikitext.read_byte_pairs(*paths)
    pieces = [tokenizer.id_to_token(number) for number in data.train.tokens.tolist()]
    text = (tmp_path / "wikitext-2-raw" / "wiki.train.raw").read_text()
    assert "".join(pieces).replace("Ġ", " ").replace("Ċ", "\n") == text
    assert "the" in pieces


def test_a_damaged_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    official.write_wikitext2_gpt2(tmp_path)
    official.write_text(tmp_path / "gpt2-bpe" / "vocab.json", "{}")
    with pytest.raises(UsageError, match=r"vocab.json and .*merges.txt do not make a vocabulary"):
        wikitext.load_wikitext2_gpt2(DataOptions(data_dir=tmp_path))


# -- characters ------------------------------------------------------------------------------------------------


def text_of(data: object) -> list[int]:
    tokens = torch.cat([data.train.tokens, data.test.tokens])  # type: ignore[attr-defined]
    numbers: list[int] = tokens.tolist()
    return numbers


def test_characters_of_any_file(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("abac" * 500)
    data = chars.load(DataOptions(data_dir=tmp_path / "poem.txt"))
    assert data.kind == wikitext.Tokens(vocabulary=3, length=128)
    assert text_of(data) == [0, 1, 0, 2] * 500
    assert len(data.test.tokens) == 200  # type: ignore[attr-defined]


def test_shakespeare_is_taken_if_it_is_there(tmp_path: Path) -> None:
    official.write_shakespeare(tmp_path)
    length = len((tmp_path / "tinyshakespeare" / "input.txt").read_text())
    assert len(text_of(chars.load(DataOptions(data_dir=tmp_path)))) == length


def test_python_itself_has_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    one, other = (chars.load(DataOptions(data_dir=place)) for place in (None, tmp_path))
    assert text_of(one) == text_of(other)
    assert len(text_of(one)) > 100_000


def test_a_text_too_short_and_a_place_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("abc")
    with pytest.raises(UsageError, match="the text of chars has 3 characters; 1290 are needed"):
        chars.load(DataOptions(data_dir=tmp_path / "poem.txt"))
    with pytest.raises(UsageError, match="it must be a folder"):
        chars.load(DataOptions(data_dir=tmp_path / "nowhere"))
