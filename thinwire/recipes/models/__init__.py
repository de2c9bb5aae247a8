"""The models of the recipes, by name: each a function `build(kind, tiny)` that fits a model to a kind of data.

Initial parameters come from torch's global generator. `tiny` asks for the two-layer form of the same code.
"""

from __future__ import annotations

MODELS: dict[str, str] = {
    "mlp": "thinwire.recipes.models.small:mlp",
    "small-cnn": "thinwire.recipes.models.small:small_cnn",
    "cnn": "thinwire.recipes.models.small:cnn",
    "resnet20": "thinwire.recipes.models.plain_resnet:resnet20",
    "resnet110": "thinwire.recipes.models.plain_resnet:resnet110",
    "resnet50": "thinwire.recipes.models.resnet:resnet50",
    "resnet152": "thinwire.recipes.models.resnet:resnet152",
    "vgg16": "thinwire.recipes.models.vgg:vgg16",
    "vgg16bn": "thinwire.recipes.models.vgg:vgg16bn",
    "vit-large": "thinwire.recipes.models.vit:vit_large",
    "lstm": "thinwire.recipes.models.lstm:lstm",
    "transformer": "thinwire.recipes.models.transformer:transformer",
    "small-gpt": "thinwire.recipes.models.transformer:small_gpt",
    "gpt2": "thinwire.recipes.models.gpt2:gpt2",
    "gpt2-large": "thinwire.recipes.models.gpt2:gpt2_large",
    "bert-base": "thinwire.recipes.models.bert:bert_base",
    "bert-large": "thinwire.recipes.models.bert:bert_large",
    "minilm": "thinwire.recipes.models.bert:minilm",
    "deepspeech": "thinwire.recipes.models.deepspeech:deepspeech",
}
"""Where each model is made, as 'module:function'; imported when it is asked for."""
