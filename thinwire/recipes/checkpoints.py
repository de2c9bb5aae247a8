"""Checkpoints: the saved states of one run, each process its own file; the last few and the best are kept.

    step00000040-process0.pt    the run after 40 steps, as process 0 knows it
    best-process0.pt            the run at its best test so far

A file ends with a checksum of itself (`sealed.py`). Processes may end at different moments and disks may fail, so a run resumes
from the newest step of which every process has a whole file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import JobError, UsageError
from thinwire.files import partial_files
from thinwire.recipes.parallel import Workers
from thinwire.recipes.sealed import DamagedFile, check_seal, load_sealed, save_sealed

State = dict[str, Any]
KEPT = 3
NAME = re.compile(r"step(\d+)-process(\d+)\.pt")


class Checkpoints:
    """Of one run, in one folder. `on_damage` gets a sentence about each damaged file, the same in every process."""

    def __init__(
        self,
        folder: Path,
        workers: Workers,
        every: int | None,
        on_damage: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.folder = folder
        self._workers = workers
        self._every = every
        self._on_damage = on_damage

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    @property
    def wanted(self) -> bool:
        return self._every is not None

    def save(self, step: int, state: State) -> None:
        """Write this process's state of a step, then drop the oldest."""
        self._write(self._path(step), state)
        mine = [self._path(one) for one in self._mine()]
        # Nobody else writes files of this process, so what is partial was left by one that was killed.
        for old in (
            *mine[:-KEPT],
            *partial_files(self._path()),
            *partial_files(self._best_path()),
        ):
            old.unlink(missing_ok=True)

    def save_best(self, state: State) -> None:
        self._write(self._best_path(), state)

    def load_latest(self) -> State | None:
        """Collective: the newest state that is whole in every process, None if nothing was saved; damaged files are named."""
        found = self._workers.gather(self._mine())
        common = sorted(set(found[0]).intersection(*found), reverse=True)
        for step in common:
            if self._is_whole(self._path(step)):
                return self._read(self._path(step))
        if common:
            raise UsageError(
                f"out has only damaged checkpoints in '{self.folder}'; remove them to start anew"
            )
        return None

    def load_best(self) -> State | None:
        """Collective: the state of the best test, if every process has it and it is whole."""
        path = self._best_path()
        there = self._workers.gather(path.exists())
        if not all(there) or not self._is_whole(path):
            return None
        state = self._read(path)
        return state if len(set(self._workers.gather(state["step"]))) == 1 else None

    def _is_whole(self, mine: Path) -> bool:
        """Collective: whether every process's file is; those that are not are named."""
        try:
            check_seal(mine)
            damage = None
        except (DamagedFile, OSError) as error:
            damage = f"the checkpoint {mine} is damaged ({error})"
        damages = [one for one in self._workers.gather(damage) if one is not None]
        for one in damages:
            self._on_damage(one)
        return not damages

    def _mine(self) -> list[int]:
        """Steps of which this process has a file, oldest first."""
        names = self.folder.glob("*.pt") if self.folder.is_dir() else ()
        found = (NAME.fullmatch(path.name) for path in names)
        return sorted(int(m[1]) for m in found if m and int(m[2]) == self._workers.process)

    def _path(self, step: int | None = None) -> Path:
        """The file of a step; of any step, with a wild card."""
        which = "*" if step is None else f"{step:08}"
        return self.folder / f"step{which}-process{self._workers.process}.pt"

    def _best_path(self) -> Path:
        return self.folder / f"best-process{self._workers.process}.pt"

    def _write(self, path: Path, state: State) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_sealed(path, state)
        except OSError as error:
            raise JobError(
                f"the checkpoint {path} cannot be written ({error.strerror}); those that were there are kept"
            ) from error

    def _read(self, path: Path) -> State:
        state: State = load_sealed(path)
        if (state["world"], state["processes"]) != (self._workers.world, self._workers.processes):
            raise UsageError(
                f"workers is {self._workers.world} in {self._workers.processes} processes, but {path} was saved by "
                f"{state['world']} in {state['processes']}; resume with the same number"
            )
        return state
