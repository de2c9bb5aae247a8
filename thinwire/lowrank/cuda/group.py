"""GroupKernels: the products of all matrices of a group, in one launch or two.

Reference: `TorchProducts`, with sums in another order. The result depends neither on the precision that is set for matrix products nor
on what else is in the bucket, and no library's workspace is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.layout import Group
from thinwire.lowrank.cuda.kernels import THREADS, WARP, WIDE, WIDE_WARPS, Kernels
from thinwire.lowrank.cuda.tables import LowRankTables, make_tables
from thinwire.lowrank.layout import FactorLayout


class GroupKernels(Kernels):
    """The kernels on one group whose gradient lies in a bucket."""

    def __init__(self, group: Group, rank: int, gradient_dtype: torch.dtype, world: int) -> None:
        super().__init__(group.device, rank, gradient_dtype)
        self.slots = len(group.slots)
        self.into_bucket = gradient_dtype == torch.float32
        """Whether the update is written to the bucket. Narrower gradients need the exact update, to keep what rounding loses."""
        self._one = torch.ones(1, dtype=torch.float32, device=group.device)
        self._share = torch.full((1,), 1 / world, dtype=torch.float32, device=group.device)
        self._tables: dict[FactorLayout, LowRankTables] = {}

    def tables(self, group: Group, sent: FactorLayout, known: FactorLayout) -> LowRankTables:
        """Where everything lies when the factors of `sent` travel. The group is an argument, because it keeps this object alive."""
        if sent not in self._tables:
            self._tables[sent] = make_tables(group, sent, known, self.lines)
        return self._tables[sent]

    def project(
        self,
        tables: LowRankTables,
        memory: Tensor,
        known: Tensor,
        sent: Tensor,
        *,
        bucket: Tensor | None = None,
        held: Tensor | None = None,
        flags: Tensor | None = None,
        ratio: Tensor | None = None,
    ) -> None:
        """Write what travels to `sent`. With a `bucket`, memory becomes `held` x `ratio` + gradient on the way."""
        fresh = bucket is not None
        source = memory if bucket is None else bucket
        before = memory if held is None else held
        raised = sent if flags is None else flags
        scale = self._one if ratio is None else ratio
        ends = [raised, scale, tables.matrices]
        if tables.row_tiles.shape[0]:
            self.find("project_rows", fresh=fresh)(
                tables.row_tiles.shape[0],
                WARP * WIDE_WARPS if self.lines > WIDE else THREADS,
                [source, before, memory, known, sent, *ends, tables.row_tiles, self.slots],
            )
        if tables.column_tiles.shape[0]:
            parts = torch.empty(tables.parts, dtype=memory.dtype, device=memory.device)
            self.find("project_columns", fresh=fresh)(
                tables.column_tiles.shape[0],
                THREADS,
                [source, before, memory, known, parts, *ends, tables.column_tiles, self.slots],
            )
            self.find("add_parts")(
                tables.part_tiles.shape[0],
                THREADS,
                [parts, sent, tables.matrices, tables.part_tiles],
            )

    def rebuild(
        self,
        tables: LowRankTables,
        out: Tensor,
        total: Tensor,
        known: Tensor,
        had: Tensor,
        status: Tensor,
    ) -> None:
        """Write the mean update to `out`, a bucket or a group's buffer. `status` is raised if it is not finite."""
        self.find("rebuild")(
            tables.tiles.shape[0],
            THREADS,
            [
                *(out, total, known, had, self._share, status, tables.matrices, tables.tiles),
                int(self.into_bucket),
            ],
        )

    def settle(
        self,
        tables: LowRankTables,
        memory: Tensor,
        sent: Tensor,
        known: Tensor,
        bases: Tensor,
        renewed: Tensor,
        had: Tensor,
        bad: Tensor,
        before: Tensor | None,
    ) -> None:
        """Apply a verdict. If it changes something, `bases` and `renewed` swap contents."""
        again = before is not None
        self.find("settle")(
            tables.tiles.shape[0],
            THREADS,
            [
                *(memory, sent, known, bases, renewed, had, bad, bad if before is None else before),
                *(tables.matrices, tables.tiles, int(again)),
            ],
        )
