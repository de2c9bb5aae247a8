"""Lockstep: virtual ranks hold the same reply, so what all of them compute from it alike is computed once.

Without it N virtual ranks that gather would decode N payloads each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

_found: ContextVar[dict[int, tuple[Tensor, Any]] | None] = ContextVar("found", default=None)
"""By the reply's id, with the reply, which keeps the id its own; None outside of a round of virtual ranks."""


@contextmanager
def one_round() -> Iterator[None]:
    """All ranks go on from one set of replies."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def alike(reply: Tensor, make: Callable[[], T]) -> T:
    """What `make` computes from a reply, the same on every rank that has it; the caller must not write to it.

    At most one such result per reply. A real rank computes it for itself.
    """
    found = _found.get()
    if found is None:
        return make()
    if id(reply) not in found:
        found[id(reply)] = (reply, make())
    return found[id(reply)][1]
