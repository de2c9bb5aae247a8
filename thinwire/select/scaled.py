"""Selection in the optimizer's scale: magnitudes are compared after a division, but values are sent as they are.

Sent are values of c, not of c / divisor: c minus what was sent is then exact, as it is without a divisor, while
(c / divisor) x divisor is not c again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.described import Described
from thinwire.layout import RowTable
from thinwire.select.base import Picks, Turn, picks_at, picks_of
from thinwire.wire.blocks import truncate_scale


@dataclass(frozen=True, eq=False)
class Divisor(Described):
    """What the optimizer divides a group's update by, in one step; the same bits on all ranks."""

    flat: Tensor
    """One positive number per element of the group's buffer, between the slots too."""
    limit: Tensor | float | None = None
    """The most that |value / divisor| may be in what a rank sends; None = no limit."""

    def scaled(self, c: Tensor) -> Tensor:
        """c in units of the divisor, to choose from."""
        return c / self.flat

    def limited(self, values: Tensor, positions: Tensor) -> Tensor:
        """The part of `values`, which lie at `positions`, that may be sent; the rest stays where it is.

        What is not finite passes, so that it is seen.
        """
        if self.limit is None:
            return values
        most = shorten(self.flat[positions] * self.limit)
        return torch.where(values.isfinite(), values.clamp(-most, most), values)


def shorten(most: Tensor) -> Tensor:
    """With the bits of bfloat16, towards zero: what a float32 that is larger leaves when that is sent is then exact."""
    return truncate_scale(most) if most.dtype == torch.float32 else most


def pick_in_scale(turn: Turn, c: Tensor, table: RowTable, divisor: Divisor) -> Picks:
    """1. Choose by the magnitude of c / divisor.
    2. Take the values of c that lie there.
    3. Cut each to the divisor's limit; what is cut off was not sent, so that it stays in memory.
    """
    chosen = turn.pick(divisor.scaled(c), table)
    if chosen.counts is None:
        picks = picks_at(c, table, chosen.indices)
    else:
        picks = picks_of(c, table, chosen.indices, chosen.counts)
    values = divisor.limited(picks.values, table.positions(picks.indices))
    return replace(picks, values=values, notes=chosen.notes)
