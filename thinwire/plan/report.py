"""PlanReport: what happens to every parameter and why, as a table a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.plan.policy import SlotPlan


@dataclass(frozen=True)
class PlanReport:
    """`print(handle.plan())` shows the table; iterate for the rows."""

    rows: tuple[SlotPlan, ...]
    notes: dict[str, str]
    """Parameters that are in a passing state, such as a flush that is still to come."""

    def __iter__(self) -> Iterator[SlotPlan]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> SlotPlan:
        return next(row for row in self.rows if row.info.name == name)

    def __str__(self) -> str:
        header = ("parameter", "shape", "kind", "what happens", "why")
        lines = [header, *(self._cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        compressed = sum(row.info.numel for row in self.rows if not row.dense)
        total = sum(row.info.numel for row in self.rows)
        share = compressed / total if total else 0.0
        table.append(f"{compressed} of {total} elements ({share:.1%}) are compressed")
        return "\n".join(table)

    def _cells(self, row: SlotPlan) -> tuple[str, ...]:
        why = self.notes.get(row.info.name, row.reason)
        shape = "x".join(map(str, row.info.shape)) or "scalar"
        return (row.info.name, shape, row.info.kind.value, row.action, why)
