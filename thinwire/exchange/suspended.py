"""What a program that waits for the network still holds.

Programs make tensors before their first request and read some of them after the last one. A driver that goes on with
a program on another CUDA stream must keep these alive: freed when the program ends on the host, their memory would
be the first stream's again before the second one has read it.
"""

from __future__ import annotations

from types import GeneratorType
from typing import Any


def find_held(program: Any) -> list[Any]:
    """The local variables of a suspended program and of the programs it runs.

    As long as the list lives, so does every tensor that the program has made and can still read.
    """
    held: list[Any] = []
    waiting: list[Any] = [program]
    while waiting:
        one = waiting.pop()
        parts: list[Any] = []
        if isinstance(one, list | tuple):
            parts = list(one)
        elif isinstance(one, dict):
            parts = list(one.values())
        elif isinstance(one, GeneratorType) and one.gi_frame is not None:
            parts = list(one.gi_frame.f_locals.values())
            waiting.append(one.gi_yieldfrom)
        # What containers hold too: a program may take it out of them before it is done with it.
        held += parts
        waiting += parts
    return held
