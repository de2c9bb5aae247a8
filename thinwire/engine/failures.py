"""Failures of collectives, in one sentence: on which rank, of what, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from thinwire.errors import ExchangeError
from thinwire.exchange.requests import Place

REMEDY = (
    "a worker has died, hangs or cannot be reached, so look at the others' output and start again "
    "from a checkpoint"
)


def exchange_failed(name: str, error: Exception) -> ExchangeError:
    """`name` is that of `name_exchange`."""
    return ExchangeError(f"{name} failed: {_reason(error)}; {REMEDY}")


def name_exchange(place: Place, what: str) -> str:
    """An exchange in the words of a sentence. Part of the ranks know each other by other numbers than the job's."""
    own = dist.get_rank() if dist.is_initialized() else place.rank
    known_as = "" if own == place.rank else f" (rank {own} of the job)"
    return f"on rank {place.rank} of {place.world}{known_as} the exchange of {what}"


@contextmanager
def failing_as(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """Collectives of torch's own that a user waits for: what torch says of a lost worker becomes our sentence."""
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        place = Place(dist.get_rank(group), dist.get_world_size(group))
        raise exchange_failed(name_exchange(place, what), error) from error


def _reason(error: Exception) -> str:
    """The first sentence of what torch says, without the place in its sources."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).split(". ")[0].rstrip(".")
