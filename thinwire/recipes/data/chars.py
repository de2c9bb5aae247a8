"""Characters of any text: tiny Shakespeare, a file of the user's, or a text that comes with Python."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from thinwire.errors import UsageError
from thinwire.recipes.data.source import DATA_VARIABLE, SOURCES, find, locate, reading
from thinwire.recipes.data.streams import Streams, WholeText
from thinwire.recipes.data.synthetic import make_tokens
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.objectives.tokens import Tokens

WINDOW = 128
TINY_WINDOW = 32
SYNTHETIC_CHARACTERS = 65
"""As many as tiny Shakespeare has."""
TEST_SHARE = 10
"""The last tenth of the text is tested on."""


def load(options: DataOptions) -> Data:
    length = TINY_WINDOW if options.tiny else WINDOW
    if options.synthetic:
        return make_tokens(Tokens(vocabulary=SYNTHETIC_CHARACTERS, length=length), options)
    text = read_text(options)
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[character] for character in text], dtype=torch.int32)
    cut = len(tokens) - len(tokens) // TEST_SHARE
    if len(tokens) - cut <= length:
        raise UsageError(
            f"the text of chars has {len(text)} characters; {(length + 1) * TEST_SHARE} are needed, "
            "so that a tenth is more than a window"
        )
    return Data(
        Tokens(vocabulary=len(characters), length=length),
        Streams(tokens=tokens[:cut], length=length),
        WholeText(tokens=tokens[cut:], length=length),
    )


def read_text(options: DataOptions) -> str:
    """The user's file if data_dir is one, tiny Shakespeare if it is there or fetched, else Python's own documentation."""
    given = options.data_dir or os.environ.get(DATA_VARIABLE)
    place = Path(given).expanduser() if given else None
    if place is not None and place.is_file():
        path = place
    elif options.download or (place is not None and is_wanted(place)):
        (path,) = locate("tiny-shakespeare", options).paths
    else:
        return read_documentation()
    with reading(path, "text in UTF-8"):
        return path.read_text("utf-8")


def is_wanted(place: Path) -> bool:
    """Whether tiny Shakespeare is to be read from there; a place that does not exist is somebody's mistake, not a no."""
    return not place.exists() or find(SOURCES["tiny-shakespeare"], place) is not None


def read_documentation() -> str:
    """The language reference that `help()` shows, some 400 000 characters that every Python brings along."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            "chars reads Python's own documentation, which this Python lacks; name a text file with --data-dir"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))
