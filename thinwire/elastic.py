"""Elastic training: checkpoints that a restarted job, of the same or another number of workers, goes on from.

folder/step00000040/shared.pt    what is the same on all ranks, as rank 0 has it
folder/step00000040/rank2.pt     what rank 2 holds back
folder/step00000040/complete     written last, with the number of ranks: the folder counts from then on
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.engine.checkpoint import ON_WORLD_CHANGE
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.validate import check_choice, check_positive_int

NAME = re.compile(r"step(\d+)")


class Snapshots:
    """Saves a job now and then, and finds the newest whole snapshot when it starts again.

    Made for `torchrun --max-restarts`: a worker dies, all are started again, and `resume` goes on from the last snapshot,
    also if fewer or more workers come back. Every rank calls `save` and `resume`, and all see one folder.

    Args:
        folder: Where snapshots are kept.
        kept: How many of the newest stay.
        on_world_change: What a changed number of workers does to what ranks hold back: "mean" has every rank go on with
            the old mean, so that no pending update is lost; "reset" drops it.

    >>> snapshots = tw.elastic.Snapshots("snapshots")
    >>> step = snapshots.resume(handle, model=ddp, optimizer=opt)
    >>> while step < steps:
    ...     train_one_step(step)
    ...     step += 1
    ...     if step % 100 == 0:
    ...         snapshots.save(step, handle, model=ddp, optimizer=opt)
    """

    def __init__(self, folder: str | Path, *, kept: int = 2, on_world_change: str = "mean") -> None:
        check_positive_int("kept", kept)
        check_choice("on_world_change", on_world_change, ON_WORLD_CHANGE)
        self.folder = Path(folder)
        self._kept = kept
        self._on_world_change = on_world_change

    def save(self, step: int, handle: Handle, **parts: Any) -> None:
        """Keep the job as it is after `step` steps. `parts` have a `state_dict` each, the same on all ranks.

        Collective: a snapshot counts when all ranks have written theirs.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        refuse_other_ranks(handle, rank, world)
        place = self.folder / f"step{step:08}"
        place.mkdir(parents=True, exist_ok=True)
        torch.save(handle.state_dict(), place / f"rank{rank}.pt")
        if rank == 0:
            shared = {name: part.state_dict() for name, part in parts.items()}
            torch.save(shared, place / "shared.pt")
        dist.barrier()
        if rank == 0:
            complete = place / "complete"
            partial = place / ".complete"
            partial.write_text(str(world))
            partial.replace(complete)
            for old in self._whole()[: -self._kept]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()

    def resume(self, handle: Handle, **parts: Any) -> int:
        """Load the newest whole snapshot into the same parts. Returns its step, 0 if there is none."""
        rank, world = dist.get_rank(), dist.get_world_size()
        refuse_other_ranks(handle, rank, world)
        # What rank 0 sees is what all load: another rank may see a folder a moment later.
        found = [str(self._whole()[-1]) if rank == 0 and self._whole() else ""]
        dist.broadcast_object_list(found, src=0)
        if not found[0]:
            return 0
        place = Path(found[0])
        shared = load(place / "shared.pt")
        for name, part in parts.items():
            if name not in shared:
                raise UsageError(f"{name} is not in {place}, which holds {', '.join(shared)}")
            part.load_state_dict(shared[name])
        saved = int((place / "complete").read_text())
        if saved == world:
            handle.load_state_dict(load(place / f"rank{rank}.pt"))
        else:
            states = [load(place / f"rank{one}.pt") for one in range(saved)]
            handle.load_state_dict(states, on_world_change=self._on_world_change)
        return step_of(place)

    def _whole(self) -> Sequence[Path]:
        """All whole snapshots, oldest first."""
        there = self.folder.iterdir() if self.folder.is_dir() else ()
        found = [one for one in there if NAME.fullmatch(one.name)]
        return sorted((one for one in found if (one / "complete").exists()), key=step_of)


def step_of(place: Path) -> int:
    match = NAME.fullmatch(place.name)
    assert match is not None
    return int(match[1])


def load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def refuse_other_ranks(handle: Handle, rank: int, world: int) -> None:
    if (handle.rank, handle.world) != (rank, world):
        raise UsageError(
            f"the handle is rank {handle.rank} of {handle.world}, this process is rank {rank} of {world}; save handles of "
            "sharded models with torch.distributed.checkpoint"
        )
