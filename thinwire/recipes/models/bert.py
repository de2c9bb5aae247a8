"""BERT from transformers, base, large and distilled to MiniLM: with the head that the data ask for, questions or pretraining."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import (
    check_length,
    check_vocabulary,
    import_transformers,
    misfit,
)
from thinwire.recipes.models.weights import find_weights
from thinwire.recipes.objectives.pretraining import Pretraining
from thinwire.recipes.objectives.questions import Questions

LONGEST = 512
BASE: dict[str, int] = {}
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


class Bert(nn.Module):
    """`model(input_ids, attention_mask, token_type_ids)` gives the two outputs of the head, by their names."""

    def __init__(self, model: nn.Module, outputs: tuple[str, str]) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        # transformers asks a two-dimensional mask whether it is needed at all, which waits for the device.
        broad = None if mask is None else mask[:, None, None, :].bool()
        found = self.model(input_ids=ids, attention_mask=broad, token_type_ids=types)
        first, second = (found[name] for name in self.outputs)
        return first, second


def bert_base(kind: Kind, tiny: bool) -> nn.Module:
    """108,893,186 parameters for questions; 133,547,324 for pretraining."""
    return _build("bert-base", kind, BASE, "bert-base-uncased", tiny)


def bert_large(kind: Kind, tiny: bool) -> nn.Module:
    """334,094,338 parameters for questions; 367,480,636 for pretraining."""
    return _build("bert-large", kind, LARGE, "bert-large-uncased", tiny)


def minilm(kind: Kind, tiny: bool) -> nn.Module:
    """22,566,146 parameters for questions; 34,613,564 for pretraining."""
    return _build("minilm", kind, MINILM, "all-MiniLM-L6-v2", tiny)


def _build(name: str, kind: Kind, shape: dict[str, int], folder: str, tiny: bool) -> nn.Module:
    if not isinstance(kind, Questions | Pretraining):
        raise misfit(name, kind, Questions, Pretraining)
    check_length(name, kind.length, LONGEST)
    package: Any = import_transformers(name)
    if isinstance(kind, Questions):
        make, outputs = package.BertForQuestionAnswering, ("start_logits", "end_logits")
    else:
        make = package.BertForPreTraining
        outputs = ("prediction_logits", "seq_relationship_logits")
    path = None if tiny else find_weights(name, folder)
    if path is not None:
        # Weights that were saved in half precision are trained in single.
        model = make.from_pretrained(path, local_files_only=True).float()
        check_vocabulary(name, model.config.vocab_size, kind.vocabulary)
    else:
        config = package.BertConfig(**(TINY if tiny else shape), vocab_size=kind.vocabulary)
        model = make(config)
    if isinstance(kind, Pretraining):
        # As in Ok-Topk's job: the decoder is a parameter of its own, and a large share of the gradient.
        decoder = model.cls.predictions.decoder
        decoder.weight = nn.Parameter(decoder.weight.detach().clone())
    return Bert(model, outputs)
