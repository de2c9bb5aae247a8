"""SplitKernels: split-and-reduce on CUDA. Seven launches for a group, from picked entries to the update in the bucket.

Reference: `SplitStep` in thinwire/exchange/split.py. The bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.cuda.chunks import BINS
from thinwire.kernels.cuda.launch import Varying, fitting
from thinwire.kernels.cuda.messages import (
    LOST,
    MATES,
    STATS,
    SUMS,
    MessageKernels,
    MessagesSent,
    in_whole_words,
    in_words,
)
from thinwire.kernels.cuda.prepared import STRIDE
from thinwire.kernels.cuda.split_tables import (
    EMIT_WARPS,
    RANGE_THREADS,
    SplitTables,
    cut_ranges,
)
from thinwire.layout import Group
from thinwire.wire.codec import Codec

ARRIVED = Varying("arrived")


class SplitKernels(MessageKernels):
    """A rank adds up what it owns."""

    def __init__(
        self,
        group: Group,
        picked: Codec,
        tables: SplitTables,
        wire: torch.dtype,
        rank: int,
        world: int,
        *,
        into_bucket: bool,
    ) -> None:
        self.lists = world
        # On average the winners are spread evenly over the owners.
        self._spare = max(0.0, sum(tables.back) - sum(tables.winners) / world)
        super().__init__(
            group,
            picked,
            tables,
            wire,
            cut_ranges(tables.edges),
            rank=rank,
            owners=world,
            world=world,
            into_bucket=into_bucket,
        )
        self._sums_bytes = in_whole_words(self.entry_bytes * self.back)

    def _prepare(self, picked: Codec) -> None:
        super()._prepare(picked)
        ranges, lists, cuts = len(self._ranges), self._lists, self._cuts[0]
        cut = [self.slots, self._ranges, self._states]
        known = [self.used, self.wrong, self.damaged, self.form, ranges]
        decided = [self.slots, self._states, *lists, self._of_sums, cuts, STATS, self.world]
        written = [cuts, self.damaged, SUMS, LOST, MATES, STATS, self.form, ranges]
        counted = [self._spare, float(self.entry_bytes)]
        self._add = [
            self._launch(
                "split_sum", ranges + 1, RANGE_THREADS, [ARRIVED, STRIDE, *cut, *lists, *known]
            ),
            self._launch("split_decide", len(self.group.slots), BINS, decided),
            self._launch(
                "split_emit",
                -(-ranges // EMIT_WARPS),
                32 * EMIT_WARPS,
                [*cut, *lists, *written, *counted],
            ),
        ]

    def send(self, payload: Tensor, memory: Tensor) -> MessagesSent:
        """Messages to all owners out of picked entries, which `memory` does not hold; what is not sent of them returns to it."""
        return self.place(payload, memory, self._sums_bytes, self.back if self._narrow else 0)

    def add_up(self, arrived: Tensor, sent: MessagesSent) -> None:
        """The largest sums of what has arrived, to `sent.sums`."""
        arrived = in_words(arrived)
        values = {
            "arrived": arrived.data_ptr(),
            "stride": fitting(arrived.stride(0)),
            "sums": sent.sums.data_ptr(),
            "lost": sent.lost.data_ptr(),
            "mates": sent.mates.data_ptr(),
            "stats": sent.stats.data_ptr(),
        }
        for launch in self._add:
            launch.start(values)
