"""The complete text of a CUDA source: what Python defines for it, what it includes, and the file itself."""

from __future__ import annotations

import re
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
COMMON = "common.cuh"
"""Comes first in every source."""
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
Defines = tuple[tuple[str, int | float | str], ...]
FLOAT_CODES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
"""What VALUE_CODE and GRADIENT_CODE may be; every source knows these names as numbers."""


def source_of(file: str, defines: Defines) -> str:
    """`file` is a name in this folder, or a path. Headers are named relative to the file that includes them."""
    names = tuple((name, number) for number, name in enumerate(FLOAT_CODES.values()))
    settings = "".join(f"#define {name} {value}\n" for name, value in (*names, *defines))
    included: set[Path] = set()
    return settings + _text_of(SOURCES / COMMON, included) + _text_of(SOURCES / file, included)


def _text_of(path: Path, included: set[Path]) -> str:
    """The text with its includes in place; nothing if it is in the source already."""
    path = path.resolve()
    if path in included:
        return ""
    included.add(path)
    return INCLUDE.sub(lambda found: _text_of(path.parent / found[1], included), path.read_text())
