"""The contract of an exchange: how one group's selected entries become the same update on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from thinwire.exchange.requests import Place, Program
from thinwire.memory.account import Account
from thinwire.select.base import Picks
from thinwire.wire.codec import Codec, Flags, Header


@dataclass(frozen=True, eq=False)
class Offer:
    """What one rank brings to an exchange in one step: (c, selection, codec) and where it stands."""

    account: Account
    """The compensated gradient c, and the book in which what is sent is written off."""
    pick: Callable[[], Picks]
    codec: Codec
    flags: Flags
    place: Place
    phase: str


@dataclass(frozen=True, eq=False)
class Outcome:
    """What every rank holds afterwards, bit for bit the same."""

    update: Tensor
    """Flat mean update of the group."""
    non_finite: Tensor
    """bool []: some rank's gradient was not finite."""
    header: Header | None = None


class Exchange(ABC):
    """A frozen setting that runs as a generator of collective requests.

    Contract: what the offer's account has written off and not been given back when the program ends is this
    rank's accepted contribution; world x update = sum over ranks of the accepted contributions.
    """

    fixed_size: bool = True
    """Whether every rank's payload has the length that shapes alone give."""

    @abstractmethod
    def run(self, offer: Offer) -> Program[Outcome]: ...
