"""Task: data x model, everything the training loop has to know about a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from thinwire.errors import UsageError
from thinwire.recipes.config import Training
from thinwire.recipes.data import DATASETS
from thinwire.recipes.examples import Data, DataOptions
from thinwire.recipes.kinds import Kind
from thinwire.recipes.models import MODELS
from thinwire.recipes.presets import PRESETS
from thinwire.tools.settings.names import check_name, import_own, look_up

PLAIN = Training(epochs=10, batch_size=32, lr=0.05, warmup_steps=50)
"""How a combination is trained for which there is no preset."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training job without a method: data x model, and how it is trained unless the user says otherwise."""

    load: Callable[[DataOptions], Data]
    build: Callable[[Kind, bool], nn.Module]
    """A freshly initialised model for a kind of data, drawn from torch's global generator; a small one if asked (--tiny)."""
    training: Training


def find_task(name: str) -> Task:
    """A task by its name, or the user's own as 'module:attribute'."""
    if name in PRESETS:
        preset = PRESETS[name]
        return compose(preset.data, preset.model, preset.training)
    if ":" not in name:
        check_name("task", name, PRESETS, " or your own as module:attribute")
    found = import_own("task", name)
    if not isinstance(found, Task):
        module, _, attribute = name.partition(":")
        raise UsageError(f"task is {name!r}, but {attribute} of {module} is not a Task")
    return found


def compose(data: str, model: str, training: Training | None = None) -> Task:
    """Any data with any model; trained as the nearest preset unless it is said how."""
    return Task(
        load=look_up("data", data, DATASETS),
        build=look_up("model", model, MODELS),
        training=training or near_training(data, model),
    )


def near_training(data: str, model: str) -> Training:
    """That of the preset with the same data and model, else of the first with the same data."""
    same_data = [preset for preset in PRESETS.values() if preset.data == data]
    same = [preset for preset in same_data if preset.model == model]
    return next((preset.training for preset in (*same, *same_data)), PLAIN)
