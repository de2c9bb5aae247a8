"""Checkpoints: the saved states of one run, each process its own file; the last few and the best are kept.

    step00000040-process0.pt    the run after 40 steps, as process 0 knows it
    best-process0.pt            the run at its best test so far

A file is complete or not there. Processes may end at different moments, so the newest step that all of them have is
the one a run resumes from.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import UsageError
from thinwire.recipes.parallel import Workers

State = dict[str, Any]
KEPT = 3
NAME = re.compile(r"step(\d+)-process(\d+)\.pt")


class Checkpoints:
    """Of one run, in one folder."""

    def __init__(self, folder: Path, workers: Workers, every: int | None) -> None:
        self._folder = folder
        self._workers = workers
        self._every = every

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    @property
    def wanted(self) -> bool:
        return self._every is not None

    def save(self, step: int, state: State) -> None:
        """Write this process's state of a step, then drop the oldest."""
        self._write(self._path(step), state)
        for old in self._mine()[:-KEPT]:
            self._path(old).unlink(missing_ok=True)

    def save_best(self, state: State) -> None:
        self._write(self._best_path(), state)

    def load_latest(self) -> State | None:
        """Collective: the newest state that every process has, None if there is none."""
        found = self._workers.gather(self._mine())
        common = set(found[0]).intersection(*found)
        return self._read(self._path(max(common))) if common else None

    def load_best(self) -> State | None:
        """Collective: the state of the best test, if every process has it."""
        state = self._read(self._best_path()) if self._best_path().exists() else None
        steps = set(self._workers.gather(None if state is None else state["step"]))
        return state if len(steps) == 1 else None

    def _mine(self) -> list[int]:
        """Steps of which this process has a file, oldest first."""
        names = self._folder.glob("*.pt") if self._folder.is_dir() else ()
        found = (NAME.fullmatch(path.name) for path in names)
        return sorted(int(m[1]) for m in found if m and int(m[2]) == self._workers.process)

    def _path(self, step: int) -> Path:
        return self._folder / f"step{step:08}-process{self._workers.process}.pt"

    def _best_path(self) -> Path:
        return self._folder / f"best-process{self._workers.process}.pt"

    def _write(self, path: Path, state: State) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # One name for all, so that what a killed process left behind is written over.
        partial = self._folder / f".partial-process{self._workers.process}.pt"
        torch.save(state, partial)
        partial.replace(path)

    def _read(self, path: Path) -> State:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
        if (state["world"], state["processes"]) != (self._workers.world, self._workers.processes):
            raise UsageError(
                f"workers is {self._workers.world} in {self._workers.processes} processes, but {path} was saved by "
                f"{state['world']} in {state['processes']}; resume with the same number"
            )
        return state
