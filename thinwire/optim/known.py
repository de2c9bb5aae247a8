"""KnownOptimizers: what is known of optimizers, by their class."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from thinwire.optim.momentum import TAKEN
from thinwire.plan.candidates import ADAM, UNKNOWN
from thinwire.plan.candidates import SGD as SGD_KIND

T = TypeVar("T")


class KnownOptimizers(Generic[T]):
    """A table that parts register in. A class stands for itself, and for its `heirs` only where that is said.

    An heir of SGD may compute something else than SGD does.
    """

    def __init__(self) -> None:
        self._entries: dict[type[Optimizer], tuple[T, bool]] = {}

    def register(self, kind: type[Optimizer], what: T, *, heirs: bool = False) -> None:
        self._entries[kind] = (what, heirs)

    def find(self, optimizer: Optimizer | None) -> T | None:
        """What is known of it, by the nearest class that was registered; None if nothing is."""
        for kind in type(optimizer).__mro__:
            what, heirs = self._entries.get(kind, (None, False))
            if what is not None and (heirs or kind is type(optimizer)):
                return what
        return None


EVIDENCE: KnownOptimizers[str] = KnownOptimizers()
"""Which column of the evidence is about an optimizer."""
EVIDENCE.register(SGD, SGD_KIND)
for _kind in (Adam, AdamW, NAdam, RAdam):
    EVIDENCE.register(_kind, ADAM, heirs=True)


def evidence_of(optimizer: Optimizer | None) -> str:
    """What is known of SGD was found with momentum."""
    found = EVIDENCE.find(optimizer) or UNKNOWN
    if optimizer is not None and found == SGD_KIND:
        # Its own momentum is 0 while a method has it.
        groups = [group.get(TAKEN, group) for group in optimizer.param_groups]
        momenta = [float(group["momentum"]) for group in groups]
        return SGD_KIND if max(momenta) else UNKNOWN
    return found
