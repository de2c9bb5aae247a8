"""Listing: what `--list` shows."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.recipes.data import DATASETS
from thinwire.recipes.models import MODELS
from thinwire.recipes.presets import PRESETS
from thinwire.recipes.settings import list_fragments


def print_list(console: Console) -> None:
    """Every task with its parts, then what else can be named."""
    table = Table("task", "data", "model", "what it is", box=box.SIMPLE_HEAD, show_edge=False)
    for name, preset in PRESETS.items():
        table.add_row(name, preset.data, preset.model, preset.about)
    console.print(table)
    for what, names in (
        ("--data", list(DATASETS)),
        ("--model", list(MODELS)),
        ("--config", list_fragments()),
    ):
        console.print(f"{what}: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
