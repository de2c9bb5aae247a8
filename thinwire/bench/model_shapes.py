"""Shapes: a short hash of what a model is made of, by which rows of a changed model are told from today's."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.bench.models import build_workload, find_model
from thinwire.bench.own_models import import_function
from thinwire.bench.step_cell import StepCell
from thinwire.errors import UsageError

HASH_DIGITS = 12


def know_models(
    cells: Sequence[StepCell],
    rows: Sequence[Mapping[str, Any]] = (),
    say: Callable[[str], object] = print,
) -> list[StepCell]:
    """The cells with the hashes of their models, as far as somebody may be misled without.

    A user's own model is built once, so that one that is wrong is said before anything is measured. What its function raises is
    said, and its cells are left for the workers to fail at: other models are measured all the same. One of thinwire's is looked at
    where `rows` know its hash already.
    """
    hashed = {row["model"] for row in rows if row["shapes"] is not None}
    known: dict[tuple[Any, ...], str | None] = {}
    for cell in cells:
        form = (cell.model, cell.batch, cell.length)
        if form in known:
            continue
        if ":" not in cell.model and cell.model not in hashed:
            known[form] = None
            continue
        try:
            known[form] = hash_model(*form)
        except UsageError:
            raise
        except Exception as error:
            say(f"model {cell.model} cannot be built: {error}")
            known[form] = digest(read_source(cell.model))
    return [replace(cell, shapes=known[cell.model, cell.batch, cell.length]) for cell in cells]


def hash_model(name: str, batch: int, length: int | None) -> str:
    """The hash of a model that is made for it: thinwire's own without memory for their values, those of others as they come."""
    if ":" in name:
        model, _ = build_workload(name, torch.device("cpu"), batch, length, seed=0)
        return hash_built(name, model)
    device = torch.device("meta")
    with device:
        return hash_built(name, find_model(name).build(device, batch, length).model)


def hash_built(name: str, model: nn.Module) -> str:
    """Of all shapes and dtypes, by name; and of the file in which a user's own model stands."""
    return digest([*list_shapes(model), *(read_source(name) if ":" in name else ())])


def list_shapes(model: nn.Module) -> list[str]:
    tensors = model.state_dict(keep_vars=True)
    return [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in tensors.items()]


def read_source(name: str) -> list[str]:
    """The text of the file that a user's function stands in; nothing where there is none."""
    function = import_function(name)
    module = sys.modules.get(getattr(function, "__module__", None) or name.partition(":")[0])
    try:
        file = inspect.getsourcefile(function) or getattr(module, "__file__", None)
    except TypeError:
        file = getattr(module, "__file__", None)
    return [Path(file).read_text()] if file and Path(file).is_file() else []


def digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:HASH_DIGITS]
