from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recipes.data import official
from thinwire.errors import UsageError
from thinwire.recipes.data import squad
from thinwire.recipes.data.groups import Groups
from thinwire.recipes.data.vocabularies import read_word_pieces
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.objectives.questions import Questions

pytest.importorskip("tokenizers")

CUT = squad.Cut(length=24, stride=5, question=6)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    official.write_bert_vocabulary(tmp_path)
    return read_word_pieces(tmp_path / "bert-vocab" / "vocab.txt")


def paper(tmp_path: Path, tokenizer: Any, content: object) -> squad.Paper:
    official.write_text(tmp_path / "paper.json", json.dumps(content))
    return squad.Paper(tmp_path / "paper.json", tokenizer, CUT)


def one_question(context: str, question: str, answer: str, begin: int) -> dict[str, Any]:
    asked = {
        "id": "1",
        "question": question,
        "answers": [{"text": answer, "answer_start": begin}],
    }
    return {"data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]}


def test_a_window_reads_question_then_text(tmp_path: Path, tokenizer: Any) -> None:
    found = paper(tmp_path, tokenizer, one_question("The Old king rules.", "is a king?", "king", 8))
    (ids,), (mask,), (types,) = found.inputs()
    words = [tokenizer.id_to_token(number) for number in ids.tolist()]
    expected = [
        "[CLS]",
        "is",
        "a",
        "king",
        "?",
        "[SEP]",
        "the",
        "old",
        "king",
        "rules",
        ".",
        "[SEP]",
    ]
    assert words == expected + ["[PAD]"] * 12
    assert mask.tolist() == [1] * 12 + [0] * 12
    assert types.tolist() == [0] * 6 + [1] * 6 + [0] * 12
    assert [column.tolist() for column in found.spans()] == [[8], [8]]
    question, offsets = found.offsets()
    assert question.tolist() == [0]
    assert offsets[0, 5:12].tolist() == [
        *([-1, -1], [0, 3], [4, 7], [8, 12], [13, 18], [18, 19], [-1, -1])
    ]


def test_every_answer_is_found_in_every_window_that_holds_it(
    tmp_path: Path, tokenizer: Any
) -> None:
    found = paper(tmp_path, tokenizer, official.squad_file(6))
    starts, ends = found.spans()
    _, offsets = found.offsets()
    answered = set()
    for row, window in enumerate(found.windows):
        question = found.questions[window.question]
        if ends[row] == 0:
            continue
        begin, end = int(offsets[row, starts[row], 0]), int(offsets[row, ends[row], 1])
        context = found.contexts[question.context]
        assert context[begin:end] == question.answers[0]
        answered.add(window.question)
    assert answered == set(range(12))
    assert int((ends == 0).sum()) > 0


def test_windows_cover_the_text_and_a_long_question_is_cut(tmp_path: Path, tokenizer: Any) -> None:
    context = " ".join(official.WORDS * 4)
    found = paper(tmp_path, tokenizer, one_question(context, "old " * 30, "the", 0))
    pieces = len(found.told[0].ids)
    room = CUT.length - CUT.question - 3
    assert [window.begin for window in found.windows][:3] == [0, 5, 10]
    assert all(window.end - window.begin <= room for window in found.windows)
    assert found.windows[-1].end == pieces
    assert found.windows[-1].begin <= found.windows[-2].end


class Oracle(nn.Module):
    """Knows the answer to every window."""

    def __init__(self, inputs: Tensor, spans: tuple[Tensor, ...]) -> None:
        super().__init__()
        columns = (column.tolist() for column in (inputs, *spans))
        self.known = {tuple(ids): span for ids, *span in zip(*columns, strict=True)}

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(2, *ids.shape)
        for row, window in enumerate(ids.tolist()):
            for which, place in enumerate(self.known[tuple(window)]):
                logits[which, row, place] = 5.0
        return logits[0], logits[1]


def test_who_knows_the_spans_answers_every_test_question(tmp_path: Path, tokenizer: Any) -> None:
    official.write_squad(tmp_path)
    data = squad.load_squad(DataOptions(data_dir=tmp_path, tiny=True))
    assert isinstance(data.test, Groups)
    dev = squad.Paper(tmp_path / "squad-v1.1" / "dev-v1.1.json", tokenizer, squad.TINY_CUT)
    oracle = Oracle(dev.inputs()[0], dev.spans())
    assert len(data.test) == 8
    windows = 0
    for places in data.test.deal_test(rank=0, world=1, batch_size=3):
        batch = data.test.batch(places, None)
        windows += len(batch[0])
        totals, _ = data.kind.measure(oracle, batch, None)
        assert {name: float(a / b) for name, (a, b) in totals.items()} == {"f1": 1.0, "em": 1.0}
    assert windows == len(dev.windows) > 8


def test_the_short_form_asks_every_fifth_question(tmp_path: Path) -> None:
    official.write_squad(tmp_path)
    whole, short = (
        load(DataOptions(data_dir=tmp_path)) for load in (squad.load_squad, squad.load_squad_short)
    )
    assert isinstance(whole.kind, Questions) and isinstance(short.kind, Questions)
    assert (whole.kind.length, short.kind.length) == (384, 256)
    assert short.kind.references == whole.kind.references[::5]
    assert (len(whole.test), len(short.test)) == (8, 2)


def test_a_part_of_the_set_will_do(tmp_path: Path) -> None:
    official.write_squad(tmp_path)
    folder = tmp_path / "squad-v1.1"
    for name in ("train", "dev"):
        (folder / f"{name}-v1.1.json").rename(folder / f"{name}-v1.1.part.json")
    assert len(squad.load_squad(DataOptions(data_dir=tmp_path)).test) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is not a file of SQuAD"),
        ('{"data": [{"title": "x"}]}', "it is not a file of SQuAD v1.1: 'paragraphs'"),
        ('{"data": []}', "it asks nothing"),
        (
            '{"data":[{"paragraphs":[{"context":"x","qas":[{"id":"7","question":"?","answers":[]}]}]}]}',
            "question 7 has no answer, as in SQuAD v2",
        ),
    ],
)
def test_what_is_no_squad_is_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    official.write_squad(tmp_path)
    official.write_text(tmp_path / "squad-v1.1" / "dev-v1.1.json", content)
    with pytest.raises(UsageError, match=message):
        squad.load_squad(DataOptions(data_dir=tmp_path))


def test_a_vocabulary_without_special_pieces_is_one_sentence(tmp_path: Path) -> None:
    official.write_squad(tmp_path)
    official.write_text(tmp_path / "bert-vocab" / "vocab.txt", "[PAD]\n[UNK]\na\n")
    with pytest.raises(UsageError, match=r"vocab.txt is damaged .* lacks \[CLS\], \[SEP\]"):
        squad.load_squad(DataOptions(data_dir=tmp_path))
