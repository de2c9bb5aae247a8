"""Accelerate: compression of a prepared model, whose state travels with `save_state` and `load_state`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from thinwire.adapters import attach
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.integrations.files import load_rank, save_rank
from thinwire.methods import Method
from thinwire.validate import check_instance

_names: WeakKeyDictionary[Accelerator, set[str]] = WeakKeyDictionary()
"""What the files of each accelerator's open handles are called."""


def compress(
    accelerator: Accelerator,
    model: nn.Module,
    method: Method,
    *,
    optimizer: Any = None,
    on_world_change: str | None = None,
    **settings: Any,
) -> Handle:
    """Compress the gradients of a model that `accelerator.prepare` returned.

    The accelerator's GradScaler is found by itself. `accelerator.save_state` and `load_state` write and read what every
    rank holds back, as `thinwire_{rank}.pt`. `handle.log(accelerator.log, step)` sends statistics to its trackers.

    Args:
        accelerator: With more than one process.
        model: What `accelerator.prepare(model)` returned.
        method: How gradients are sent: tw.Auto(), which measures and chooses, or one by name such as tw.ADTopK(density=0.01).
        optimizer: Needed by methods that take momentum over, and by tw.Auto(), which stays dense without it; prepared or not.
        on_world_change: If a checkpoint was saved by another number of processes: "mean" or "reset".
        settings: What `tw.attach` takes besides.

    Returns:
        The handle, as `tw.attach` returns it.

    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> handle = compress(accelerator, model, tw.ADTopK(density=0.01))
    """
    check_instance("accelerator", accelerator, Accelerator, "an accelerate.Accelerator")
    if accelerator.num_processes == 1:
        raise UsageError(
            "accelerator has 1 process, which sends nothing; call compress if accelerator.num_processes > 1"
        )
    settings.setdefault("grad_scaler", accelerator.scaler)
    # Accelerate wraps the optimizers it prepares.
    own = getattr(optimizer, "optimizer", optimizer)
    handle = attach(model, method, optimizer=own, **settings)
    taken = _names.setdefault(accelerator, set())
    # A handle that takes the place of one that was closed has to find that one's files.
    name = next(one for one in _numbered("thinwire") if one not in taken)
    taken.add(name)
    handle.on_close(partial(taken.discard, name))

    def save(models: Any, weights: Any, folder: str) -> None:
        save_rank(handle, folder, name=name)

    def load(models: Any, folder: str) -> None:
        load_rank(handle, folder, name=name, on_world_change=on_world_change)

    handle.on_close(accelerator.register_save_state_pre_hook(save).remove)
    handle.on_close(accelerator.register_load_state_pre_hook(load).remove)
    return handle


def _numbered(name: str) -> Iterator[str]:
    """The name, and then the same with 2, 3 and so on behind it."""
    yield name
    yield from (f"{name}{number}" for number in count(2))
