"""Palette: which colour and which dash a method has, in every picture and on every page.

Plain training and torch's own hooks are black, what sends nothing is grey, and every method of thinwire has a place of its own.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from typing import Any

from thinwire.tools.methods import METHODS

COLOURS = (
    "#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#3d9fd6", "#b3a600", "#7a8288",
)  # fmt: skip
"""Okabe and Ito's, told apart by colour-blind readers too; the light ones darker, to be seen on white. Grey comes last."""
ON_DARK = {
    "#000000": "#f2f2f2",
    "#0072B2": "#4da3e0",
    "#3d9fd6": "#56B4E9",
    "#b3a600": "#f0e442",
    "#7a8288": "#9aa5b1",
}
"""Colours that could not be seen on a dark ground as they are."""
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)))
GREY = len(COLOURS) - 1
BLACKS = ("dense", "ddp", "ddp-bf16", "ddp-powersgd", "hsdp")
SILENT = ("no_sync", "noop")
LOCAL = ("diloco", "streaming-diloco", "sparseloco")
HUES = GREY - 1
"""Colours that are neither black nor grey."""

WORK = {
    "compute": "#4c78a8",
    "encode": "#f58518",
    "decode": "#e45756",
    "waits": "#d3d8dd",
    "travels": "#7f8c99",
}
"""What a bucket or a step does, and its colour in bars and timelines."""

PLANNED = {
    "bf16": "ddp-bf16",
    "int8": "quantized",
    "int4": "quantized-4bit",
    "int2": "quantized-2bit",
    "int1": "quantized-1bit",
}
"""Candidates of the planner that are called otherwise than their methods."""


def find_style(method: str, sibling: int = 0) -> tuple[int, int]:
    """The places of a method's colour and dash in COLOURS and DASHES: the same in every picture.

    A method that is drawn several times keeps its colour; `sibling` numbers its lines and changes the dash.
    """
    for colour, names in ((0, BLACKS), (GREY, SILENT)):
        if method in names:
            return colour, (names.index(method) + sibling) % len(DASHES)
    known = [*(name for name in METHODS if name not in BLACKS), *LOCAL]
    # One's own method has no place of its own, but always the same.
    place = known.index(method) if method in known else zlib.crc32(method.encode())
    return 1 + place % HUES, (place // HUES + sibling) % len(DASHES)


def find_method(label: str) -> str:
    """The method that a line's name speaks of: 'topk@0.01#2', 'adtopk-residual-1%', 'int4', 'acpsgd-4'."""
    name = re.split("[@# ]", label)[0]
    if name in METHODS:
        return name
    name = re.sub(r"(-residual)?-[\d.]+%?$", "", name)
    return PLANNED.get(name, name)


class Styles:
    """Hands every line of a picture or page its colour and dash."""

    def __init__(self) -> None:
        self._drawn: Counter[str] = Counter()
        self._given: dict[tuple[str, str], tuple[int, int]] = {}

    def find(self, method: str, line: str) -> tuple[int, int]:
        """The same for the same line, another dash for another line of the method, as long as there is one left."""
        if (method, line) not in self._given:
            first = self._drawn[method]
            styles = [find_style(method, first + more) for more in range(len(DASHES))]
            free = [style for style in styles if style not in self._given.values()]
            self._given[method, line] = (free or styles)[0]
            self._drawn[method] += 1
        return self._given[method, line]

    def look(self, method: str, line: str) -> dict[str, Any]:
        """The same as matplotlib calls it."""
        colour, dash = self.find(method, line)
        return {"color": COLOURS[colour], "linestyle": DASHES[dash]}
