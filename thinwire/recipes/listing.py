"""Listing: what `--list` shows."""

from __future__ import annotations

from rich import box
from rich.table import Table

from thinwire.recipes.data import DATASETS
from thinwire.recipes.models import MODELS
from thinwire.recipes.presets import PRESETS
from thinwire.recipes.settings import list_fragments
from thinwire.tools.methods import METHODS
from thinwire.tools.tables import make_console, say


def print_list() -> None:
    """Every task with its parts, then what else can be named."""
    console = make_console()
    table = Table("task", "data", "model", "what it is", box=box.SIMPLE_HEAD, show_edge=False)
    for name, preset in PRESETS.items():
        table.add_row(name, preset.data, preset.model, preset.about)
    console.print(table)
    for what, names in (
        ("--data", DATASETS),
        ("--model", MODELS),
        ("--method", METHODS),
        ("--config", list_fragments()),
    ):
        say(console, f"{what}: {', '.join(names)}")
