"""The contract of an exchange: how one group's selected entries become the same update on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire.described import Described
from thinwire.exchange.requests import Place, Program
from thinwire.forms import Formed
from thinwire.kernels.journal import Journal
from thinwire.layout import RowTable, Shard, SlotRows
from thinwire.memory.account import Account
from thinwire.select.base import Picks, Selector, Turn
from thinwire.select.scaled import Divisor, pick_in_scale
from thinwire.wire.codec import Codec, Flags, Header

PICKED_ENTRIES = "entries that Offer.pick chose, added on the way"
"""The form of exchanges without a state that ask an offer for its account, its flags and its `pick` alone."""


Delivery = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes sums over ranks at flat positions (int64, each once; what is outside the group is nowhere), which are all there is of an
update, and writes their mean into the bucket. Returns the bucket, and bool []: a mean is not finite."""


@dataclass(frozen=True, eq=False)
class Offer(Described):
    """What one rank brings to an exchange in one step."""

    account: Account
    """The compensated gradient c, and the book in which what is sent is written off."""
    selection: Turn
    """How entries of c are chosen in this step."""
    codec: Codec
    """The rows of the group's slots, and how entries are written down."""
    flags: Flags
    """What this rank knows of its gradient beforehand."""
    place: Place
    """Which rank this is, among how many."""
    phase: str
    """The name under which bytes are counted."""
    counts: Sequence[int] = ()
    """How often each slot has been exchanged before; the same on all ranks."""
    usual_rows: Sequence[SlotRows] = ()
    """The rows by which the plan decides, whatever the turn: what belongs to a slot for good is cut by these."""
    divisor: Divisor | None = None
    """The scale in which magnitudes are compared, where it is not that of c itself."""

    picks: Picks | None = None
    """This rank's choice on the codec's rows, where kernels have made it already."""
    deliver: Delivery | None = None
    """Writes the update into the bucket, where kernels can do that."""

    def pick(self) -> Picks:
        """This rank's choice on the codec's rows."""
        if self.picks is not None:
            return self.picks
        c, table = self.account.c, self.codec.table
        if self.divisor is None:
            return self.selection.pick(c, table)
        return pick_in_scale(self.selection, c, table, self.divisor)

    def pick_on(self, table: RowTable, members: Sequence[int], c: Tensor) -> Picks:
        """The same selection on other rows, which lie in the flat gradient `c`; `members` are the slots they belong to."""
        return self.selection.only(members).pick(c, table)


@dataclass(frozen=True, eq=False)
class Outcome(Described):
    """What every rank holds afterwards, bit for bit the same."""

    update: Tensor
    """Flat mean update of the group; the bucket itself if it has been `delivered`."""
    non_finite: Tensor
    """bool []: some rank's gradient was not finite."""
    header: Header | None = None
    """What all ranks said beside their entries, where payloads have headers."""
    sent: Tensor | None = None
    """int [slots]: entries this rank sent, where the exchange decides that."""
    delivered: bool = False
    """Whether the update is in the bucket already, and `non_finite` tells of sums that overflowed too."""


class Exchange(Formed, ABC):
    """A frozen setting that runs as a generator of collective requests.

    Contract: what the offer's account has written off and not been given back when the program ends is this
    rank's accepted contribution; world x update = sum over ranks of the accepted contributions.
    """

    computed_by: ClassVar[tuple[str, ...]] = ("run",)

    host_sync_free: bool = True
    """Whether a step on an accelerator never makes the host wait."""
    offers_all: bool = True
    """Whether every rank selects in all of its gradient, so that nothing is overlooked that is not finite."""
    moves_memory: bool = False
    """Whether what is held back may move to another rank, so that a rank cannot tell what of its own was sent."""
    keeps_choice: bool = False
    """Whether a rank sends just what `Offer.pick` chose: values of several ranks are never compared."""
    sums_on_the_way: bool = False
    """Whether values are added before they reach everybody: they then travel as plain floating-point numbers,
    without selection notes, and the exchange counts the entries itself."""

    @property
    def gathered_after(self) -> int | None:
        """Rounds of requests before a gathering that others can share; None if there is none."""
        return None

    @property
    def host_sizes(self) -> frozenset[int]:
        """Ranks per host, if it asks for something inside or between hosts; otherwise empty."""
        return frozenset()

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

    def slot_bits(self, rows: SlotRows, value_bits: float, index_bits: float, world: int) -> float:
        """Bits a rank sends for a parameter."""
        return rows.entries * self.entry_bits(value_bits, index_bits, world)


class ExchangeSession:
    """An exchange at work. This one has no state; exchanges that learn or cache override it."""

    journal: Journal | None = None
    """Where a session notes what steps change in it, so that one that is skipped leaves no trace; None if nobody asks."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def keep_journal(self, journal: Journal) -> None:
        self.journal = journal

    def run(self, offer: Offer) -> Program[Outcome]:
        return self.exchange.run(offer)

    def state_dict(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Numbers per parameter name, for all `names`; the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Take from `state` what belongs to this session's parameters."""
