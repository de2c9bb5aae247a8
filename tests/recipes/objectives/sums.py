"""Sums of metrics over batches, as the loop adds them up."""

from __future__ import annotations

from thinwire.recipes.kinds import Kind, Totals


def summarise(kind: Kind, *batches: Totals) -> dict[str, float]:
    names = batches[0].keys()
    return kind.summarise(
        {
            name: (
                sum(float(totals[name][0]) for totals in batches),
                sum(float(totals[name][1]) for totals in batches),
            )
            for name in names
        }
    )
