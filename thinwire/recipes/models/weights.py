"""Pretrained weights of transformers' models, from a folder of the user's; nothing is fetched."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.errors import UsageError

WEIGHTS_VARIABLE = "THINWIRE_WEIGHTS"
"""Names a folder that holds folders such as bert-base-uncased/ as transformers saves them."""


def find_weights(model: str, folder: str) -> Path | None:
    """Where this model's weights are; None, for random ones, unless the user has named a folder of weights."""
    root = os.environ.get(WEIGHTS_VARIABLE)
    if not root:
        return None
    path = Path(root) / folder
    if not (path / "config.json").is_file():
        raise UsageError(
            f"{WEIGHTS_VARIABLE} is {root!r}, but it has no {folder}/config.json for model {model!r}; "
            "put the pretrained model there, or unset it to begin from random weights"
        )
    return path
