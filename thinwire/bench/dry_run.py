"""The dry run of a benchmark: what it would measure, a line each, and nothing started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be measured and start nothing.")
]


def show_plan(measurements: Sequence[str], where: str) -> None:
    """Print them under their number; `where` is on what they would be measured."""
    typer.echo(f"{len(measurements)} to measure, on {where}:")
    for line in measurements:
        typer.echo(f"  {line}")
