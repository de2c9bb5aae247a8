"""Files: what every rank holds back, as one file per rank in the folder of a framework's checkpoint."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.engine.checkpoint import agree_everywhere
from thinwire.errors import UsageError
from thinwire.files import write_bytes
from thinwire.handle import Handle
from thinwire.layout import local_part

logger = logging.getLogger(__name__)

FILES = "files"
"""Of how many files one is."""


def save_rank(handle: Handle, folder: str | Path, *, name: str = "thinwire") -> Path:
    """Write this rank's state to `folder`, as `{name}_{rank}.pt`; every rank calls it.

    Args:
        handle: Whose state it is.
        folder: Where the checkpoint is; it is made if need be. Ranks of several machines may have one each.
        name: How the files' names begin; one per handle.

    Returns:
        The file. It is complete or not there.
    """
    path = _path(folder, name, dist.get_rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save({**_plain(handle.state_dict()), FILES: dist.get_world_size()}, content)
    write_bytes(path, content.getvalue())
    return path


def load_rank(
    handle: Handle,
    folder: str | Path,
    *,
    name: str = "thinwire",
    on_world_change: str | None = None,
) -> bool:
    """Restore what `save_rank` wrote to `folder`; every rank calls it.

    1. Every rank looks for its own file, or for all files if another number of ranks wrote them.
    2. The ranks compare what they found: all of them load the same step, or none does.
    3. Where there is nothing, a warning says so and memory stays as it is.

    Args:
        handle: Whose state it is.
        folder: Where `save_rank` wrote to.
        name: How the files' names begin.
        on_world_change: If the number of ranks is another one: "mean" gives everybody the mean, "reset" nothing. Other
            shards can only be "reset"; what they hold back is moved by a distributed checkpoint.

    Returns:
        Whether there was anything to restore.
    """
    states: list[Mapping[str, Any]] = []
    try:
        states = _read(Path(folder), name, dist.get_rank(), (handle.rank, handle.world))
        found = _describe(states)
    except Exception as error:  # A rank that raised alone would leave the others waiting.
        found = f"a file that cannot be read ({error})"
        agree_everywhere(handle.reducer.driver, handle.beside, {"the saved state": found})
        raise
    agree_everywhere(handle.reducer.driver, handle.beside, {"the saved state": found})
    if not states:
        logger.warning(
            "there is no %s in %s; nothing is restored of what was held back, so the run differs from one that was never interrupted",
            _path(folder, name, dist.get_rank()).name,
            folder,
        )
        return False
    handle.load_state_dict(states, on_world_change=on_world_change)
    return True


def _read(folder: Path, name: str, rank: int, seat: tuple[int, int]) -> list[Mapping[str, Any]]:
    """What was saved of this seat (rank, ranks) by this rank, or all files if that was another seat; nothing if there is none.

    The first rank's file says how many were written. Files of more ranks may be left there from an earlier time.
    """
    own = _path(folder, name, rank)
    known = [path for path in (_path(folder, name, 0), own) if path.exists()]
    if not known:
        return []
    first = _load(known[0])
    saved = int(first.get(FILES, first["world"]))
    if rank < saved and own.exists():
        state = _load(own)
        if seat in _seats(state):
            return [state]
    paths = [_path(folder, name, one) for one in range(saved)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise UsageError(
            f"{folder} was written by {saved} ranks, and {', '.join(missing)} is not there"
        )
    return [_load(path) for path in paths]


def _seats(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(int(content["rank"]), int(state["world"])) for content in state["ranks"].values()]


def _plain(state: Any) -> Any:
    """The same state with this rank's part of what is spread over ranks: another job may have no such mesh."""
    if isinstance(state, Tensor):
        return local_part(state)
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state


def _describe(states: list[Mapping[str, Any]]) -> str:
    """What all ranks must have found alike."""
    if not states:
        return "none"
    steps = {int(content["step"]) for state in states for content in state["ranks"].values()}
    return f"step {', '.join(map(str, sorted(steps)))} of {states[0]['world']} ranks"


def _path(folder: str | Path, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}_{rank}.pt"


def _load(path: Path) -> Mapping[str, Any]:
    """Mapped into memory: of files that are only asked who wrote them little is read."""
    return torch.load(str(path), weights_only=True, map_location="cpu", mmap=True)
