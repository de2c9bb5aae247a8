from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.models.kinds import SMALL
from thinwire.errors import UsageError
from thinwire.recipes.models.bert import TINY, bert_base
from thinwire.recipes.models.gpt2 import gpt2
from thinwire.recipes.models.weights import WEIGHTS_VARIABLE
from thinwire.recipes.objectives.questions import Questions


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture
def weights(transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights with a small 'bert-base-uncased', of pretraining as published ones are."""
    model = transformers.BertForPreTraining(transformers.BertConfig(**TINY, vocab_size=50))
    model.save_pretrained(tmp_path / "bert-base-uncased")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path))
    return tmp_path


def embedding(model: Any) -> torch.Tensor:
    return model.model.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize("kind", ["questions", "pretraining"])
def test_pretrained_weights_are_loaded(transformers: Any, weights: Path, kind: str) -> None:
    saved = transformers.BertModel.from_pretrained(weights / "bert-base-uncased")
    model = bert_base(SMALL[kind], False)
    assert torch.equal(embedding(model), saved.embeddings.word_embeddings.weight)


def test_weights_in_half_precision_are_trained_in_single(transformers: Any, weights: Path) -> None:
    saved = transformers.BertModel.from_pretrained(weights / "bert-base-uncased").half()
    saved.save_pretrained(weights / "bert-base-uncased")
    model = bert_base(SMALL["questions"], False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(embedding(model), saved.embeddings.word_embeddings.weight.float())


def test_the_tiny_form_is_not_pretrained(transformers: Any, weights: Path) -> None:
    saved = transformers.BertModel.from_pretrained(weights / "bert-base-uncased")
    model = bert_base(SMALL["questions"], True)
    assert not torch.equal(embedding(model), saved.embeddings.word_embeddings.weight)


def test_missing_weights_are_named(transformers: Any, weights: Path) -> None:
    with pytest.raises(UsageError, match=r"THINWIRE_WEIGHTS is .* it has no gpt2/config.json"):
        gpt2(SMALL["tokens"], False)


def test_another_vocabulary_is_refused(transformers: Any, weights: Path) -> None:
    with pytest.raises(UsageError, match="know 50 tokens; the data have 51"):
        bert_base(Questions(vocabulary=51, length=12), False)
