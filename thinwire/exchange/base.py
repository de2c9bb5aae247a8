"""The contract of an exchange: how one group's selected entries become the same update on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from thinwire.exchange.requests import Place, Program
from thinwire.layout import Shard
from thinwire.memory.account import Account
from thinwire.select.base import Picks, Selector
from thinwire.select.rows import RowTable, SlotRows
from thinwire.wire.codec import Codec, Flags, Header


class RowPicker(Protocol):
    """Selects on any rows of the group's slots."""

    def __call__(self, table: RowTable, members: Sequence[int], c: Tensor | None = None) -> Picks:
        """`members` says which slots the rows belong to; `c` is the flat gradient they lie in, None = the account's."""


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
    steps: Sequence[int] = ()
    """How often each slot has been exchanged before; the same on all ranks."""
    deterministic: bool = False
    """Sum dense parts in rank order, so that bits do not depend on the bucketing."""
    pick_rows: RowPicker | None = None
    """The same selection on other rows."""
    selector: Selector | None = None
    """The selection, if it looks at nothing but c and rows: ranks in one process may then select together."""
    usual_rows: Callable[[], Sequence[SlotRows]] | None = None
    """The rows by which the plan decides, whatever the turn: what belongs to a slot for good is cut by these."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What every rank holds afterwards, bit for bit the same."""

    update: Tensor
    """Flat mean update of the group; the bucket itself if it has been `delivered`."""
    non_finite: Tensor
    """bool []: some rank's gradient was not finite."""
    header: Header | None = None
    sent: Tensor | None = None
    """int [slots]: entries this rank sent, where the exchange decides that."""
    delivered: bool = False
    """Whether the update is in the bucket already, and `non_finite` tells of sums that overflowed too."""


class Exchange(ABC):
    """A frozen setting that runs as a generator of collective requests.

    Contract: what the offer's account has written off and not been given back when the program ends is this
    rank's accepted contribution; world x update = sum over ranks of the accepted contributions.
    """

    host_sync_free: bool = True
    """Whether a step on an accelerator never makes the host wait."""
    moves_memory: bool = False
    """Whether what is held back may move to another rank, so that a rank cannot tell what of its own was sent."""
    sums_on_the_way: bool = False
    """Whether values are added before they reach everybody: they then travel as plain floating-point numbers,
    without selection notes, and the exchange counts the entries itself."""

    @abstractmethod
    def run(self, offer: Offer) -> Program[Outcome]: ...

    def session(self) -> ExchangeSession:
        return ExchangeSession(self)

    def shard(self, rows: SlotRows, place: Place) -> Shard:
        """The part of a parameter of which this rank holds back what is not sent; `rows` are its usual rows."""
        return Shard(rows.slot.shape)

    def objection(self, selector: Selector) -> str | None:
        """Why this exchange cannot carry that selection, as the end of a sentence; None if it can."""
        return None

    def entry_bits(self, value_bits: float, index_bits: float, world: int) -> float:
        """Bits a rank sends per entry it may select; the cost model behind `dense_fallback`."""
        return (world - 1) * (value_bits + index_bits)


class ExchangeSession:
    """An exchange at work. This one has no state; exchanges that learn or cache override it."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def run(self, offer: Offer) -> Program[Outcome]:
        return self.exchange.run(offer)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Numbers per parameter name, for all `names`; the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Take from `state` what belongs to this session's parameters."""
