"""Presets: the published training jobs, as `presets.toml` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from thinwire.recipes.config import Training
from thinwire.tools.settings.building import build
from thinwire.tools.settings.sections import read_file


class PresetTask(NamedTuple):
    """A job by its parts' names."""

    data: str
    """In `thinwire.recipes.data.DATASETS`."""
    model: str
    """In `thinwire.recipes.models.MODELS`."""
    training: Training
    about: str
    """Whose job it is, and what was changed; a line of `thinwire train --list`."""


def read_presets(path: Path) -> dict[str, PresetTask]:
    content = read_file(path)
    trainings: dict[str, Training] = {}
    for name, values in content["training"].items():
        base = trainings.get(values.pop("like", ""))
        trainings[name] = build(Training, values, where=f"training.{name}", base=base)
    return {name: read_task(trainings, **values) for name, values in content["task"].items()}


def read_task(
    trainings: dict[str, Training],
    training: str,
    change: dict[str, Any] | None = None,
    **names: str,
) -> PresetTask:
    how = build(Training, change or {}, where=training, base=trainings[training])
    return PresetTask(training=how, **names)


PRESETS = read_presets(Path(__file__).with_name("presets.toml"))
