"""PlanReport: what happens to every parameter and why, as a table a person can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from thinwire.observe.notebook import html_table
from thinwire.plan.policy import SlotPlan

HEADER = ("parameter", "shape", "kind", "what happens", "why")


@dataclass(frozen=True, repr=False)
class PlanReport:
    """`print(handle.plan())` shows the table; iterate for the rows."""

    rows: tuple[SlotPlan, ...]
    backends: dict[str, str] = field(default_factory=dict)
    """Who does the work of each parameter, and why nobody faster does; empty before the first step."""
    memory_bytes: int = 0
    """What this rank holds back at most, from step to step, without the spare bytes."""
    spare_bytes: int = 0
    """Memory before the last step, kept because steps can be skipped."""
    kept_bytes: int = 0
    """What a step keeps until its verdict, so that what was sent can be taken back; 0 before the first step."""
    beside: dict[str, int] = field(default_factory=dict)
    """Bytes of what an adapter keeps beside the memory, by what it is."""

    def __iter__(self) -> Iterator[SlotPlan]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> SlotPlan:
        return next(row for row in self.rows if row.info.name == name)

    def __str__(self) -> str:
        lines = [HEADER, *(self._cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*table, *self._totals()])

    def __repr__(self) -> str:
        return f"<PlanReport: {self._totals()[0]}; print it to see every parameter>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table(HEADER, map(self._cells, self.rows), self._totals())

    def _totals(self) -> list[str]:
        """Sentences below the table."""
        compressed = sum(row.info.numel for row in self.rows if not row.dense)
        total = sum(row.info.numel for row in self.rows)
        share = compressed / total if total else 0.0
        sentences = [f"{compressed} of {total} elements ({share:.1%}) are compressed"]
        if self.memory_bytes:
            spare = f", and {self.spare_bytes / 1e6:.1f} MB so that steps can be skipped"
            each = self.memory_bytes / max(1, compressed)
            sentences.append(
                f"memory takes {self.memory_bytes / 1e6:.1f} MB ({each:.3g} bytes per compressed element)"
                f"{spare if self.spare_bytes else ''}"
            )
        if self.kept_bytes:
            sentences.append(
                f"what was sent is kept for a step: {self.kept_bytes / 1e6:.1f} MB "
                f"({self.kept_bytes / max(1, compressed):.3g} bytes per compressed element)"
            )
        for what, nbytes in self.beside.items():
            sentences.append(f"{what} takes {_amount(nbytes, total)}")
        if self.beside:
            kept = self.memory_bytes + self.spare_bytes + self.kept_bytes
            sentences.append(f"all of it takes {_amount(kept + sum(self.beside.values()), total)}")
        return sentences + self._workers()

    def _workers(self) -> list[str]:
        """One sentence for all parameters that the same code works on, for the same reason."""
        alike: dict[str, list[str]] = {}
        for row in self.rows:
            if row.info.name in self.backends:
                alike.setdefault(self.backends[row.info.name], []).append(row.info.name)
        return [f"work on {shorten(ns)} is done by {who}" for who, ns in alike.items()]

    def _cells(self, row: SlotPlan) -> tuple[str, ...]:
        shape = "x".join(map(str, row.info.shape)) or "scalar"
        return (row.info.name, shape, row.info.kind.value, row.action, row.reason)


def shorten(names: Sequence[str], shown: int = 2) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - shown
    *first, last = [*names[:shown], f"{more} more"] if more > 0 else names
    return f"{', '.join(first)} and {last}" if first else last


def _amount(nbytes: int, elements: int) -> str:
    return f"{nbytes / 1e6:.1f} MB ({nbytes / max(1, elements):.3g} bytes per element)"
