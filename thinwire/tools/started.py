"""Started: what torchrun, or its like, has told this process by its environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from thinwire.errors import UsageError


def is_worker_already() -> bool:
    """Whether torchrun or its like has started this process as one of many."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UsageError(
                f"{name} is not set, but RANK and WORLD_SIZE are; start the command with torchrun, or unset them"
            )
    return True


def workers_started(asked: Sequence[int] = ()) -> int | None:
    """How many workers were started, None if nobody did; a number asked for must be that one."""
    if not is_worker_already():
        return None
    world = int(os.environ["WORLD_SIZE"])
    if asked and list(asked) != [world]:
        said = ",".join(map(str, asked))
        raise UsageError(
            f"workers is {said}, but {world} were started already (WORLD_SIZE); leave --workers out"
        )
    return world
