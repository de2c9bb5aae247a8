from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.recipes.data import official
from thinwire.errors import UsageError
from thinwire.recipes.data import wikipedia
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.objectives.pretraining import NOT_MASKED

pytest.importorskip("tokenizers")

LETTERS = "abcdefgh"


@pytest.fixture
def pairs(tmp_path: Path) -> wikipedia.Pairs:
    """Eight documents; the sentences of each repeat one letter and say where they stand by their length."""
    official.write_bert_vocabulary(tmp_path)
    documents = ["\n".join(" ".join(letter * n) for n in range(2, 12)) for letter in LETTERS]
    for part in ("train", "test"):
        official.write_text(tmp_path / "wikipedia" / f"{part}.txt", "\n\n".join(documents))
    data = wikipedia.load(DataOptions(data_dir=tmp_path, tiny=True))
    assert isinstance(data.train, wikipedia.Pairs)
    return data.train


def test_passages_are_whole_sentences_of_one_document(pairs: wikipedia.Pairs) -> None:
    passages = pairs.passages
    texts = [
        passages.sentences(*passages.first[which : which + 2]) for which in range(len(passages))
    ]
    assert "\n".join(texts).split("\n") == [
        " ".join(letter * n) for letter in LETTERS for n in range(2, 12)
    ]
    assert all(len(set(text) - {" ", "\n"}) == 1 for text in texts)


def test_the_second_text_follows_or_is_of_another_document(pairs: wikipedia.Pairs) -> None:
    every = torch.arange(len(pairs)).repeat(20)
    ids, mask, types, targets, is_next = pairs.batch(every, torch.Generator().manual_seed(0))
    original = torch.where(targets == NOT_MASKED, ids, targets)
    # A passage of one sentence at the end of its document has nothing that follows it.
    assert 0.3 < is_next.float().mean() < 0.6
    for row, follows in enumerate(is_next.tolist()):
        length = int(mask[row].sum())
        words = [pairs.tokenizer.id_to_token(number) for number in original[row, :length].tolist()]
        cut = words.index("[SEP]")
        assert (words[0], words[-1]) == ("[CLS]", "[SEP]")
        first, second = set(words[1:cut]), set(words[cut + 1 : -1])
        assert len(first) == len(second) == 1
        assert (first == second) == bool(follows)
        assert types[row, : cut + 1].sum() == 0
        assert types[row, cut + 1 : length].all()
        assert types[row, length:].sum() == mask[row, length:].sum() == 0


def test_masking_is_15_percent_in_three_ways(pairs: wikipedia.Pairs) -> None:
    every = torch.arange(len(pairs)).repeat(60)
    ids, mask, _, targets, _ = pairs.batch(every, torch.Generator().manual_seed(0))
    chosen = targets != NOT_MASKED
    special = [pairs.tokenizer.token_to_id(piece) for piece in ("[CLS]", "[SEP]", "[PAD]")]
    assert not torch.isin(targets[chosen], torch.tensor(special)).any()
    tokens = mask.sum() - 3 * len(every)
    assert abs(chosen.sum() / tokens - 0.15) < 0.01
    as_mask = ids[chosen] == pairs.tokenizer.token_to_id("[MASK]")
    as_it_is = ids[chosen] == targets[chosen]
    assert abs(as_mask.float().mean() - 0.8) < 0.03
    assert abs(as_it_is.float().mean() - 0.1) < 0.03
    assert not chosen[mask == 0].any()


def test_evaluation_does_not_depend_on_the_company(pairs: wikipedia.Pairs) -> None:
    together = pairs.batch(torch.tensor([1, 2, 3]), None)
    alone = pairs.batch(torch.tensor([3]), None)
    assert all(torch.equal(a[2:], b) for a, b in zip(together, alone, strict=True))


def test_the_longer_text_gives_way(pairs: wikipedia.Pairs) -> None:
    room = pairs.length - 3
    _, types = pairs.join([[7] * 50, [7] * 50, [7] * 2], [[8] * 50, [8] * 2, [8] * 50])
    firsts, seconds = (types == 0).sum(1) - 2, (types == 1).sum(1) - 1
    assert firsts.tolist() == [room // 2, room - 2, 2]
    assert seconds.tolist() == [room - room // 2, 2, room - 2]


@pytest.mark.parametrize(("content", "message"), [("\n\n", "holds no sentence"), ("", "not text")])
def test_an_empty_text_is_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    official.write_wikipedia(tmp_path)
    official.write_text(tmp_path / "wikipedia" / "test.txt", content)
    with pytest.raises(UsageError, match=message):
        wikipedia.load(DataOptions(data_dir=tmp_path))
