"""The examples, as people start them: a few steps of each, and processes that are really killed."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lanes import mostly_slow
from tests.launch import finish, launch, launch_forks, start

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.workers


@dataclass(frozen=True)
class Example:
    name: str
    needs: str = "torch"
    """The package without which it is skipped."""
    few: tuple[str, ...] = ("--steps", "20")
    whole: tuple[str, ...] = ()
    interrupted: tuple[str, ...] | None = None
    """Options of a run that is killed, where it can be resumed."""

    @property
    def path(self) -> Path:
        pytest.importorskip(self.needs)
        return EXAMPLES / f"{self.name}.py"


SAVING = ("--steps", "40", "--save-every", "10")
ALL = [
    Example("ddp_resume", interrupted=SAVING),
    Example("nanogpt_ddp"),
    Example("hsdp_loop", interrupted=SAVING),
    Example("accelerate_loop", "accelerate", interrupted=SAVING),
    Example("trainer_finetune", "transformers", interrupted=SAVING),
    Example("lightning_module", "lightning", ("--epochs", "1"), interrupted=("--epochs", "3")),
]
RESUMABLE = [one for one in ALL if one.interrupted is not None]
SUMMARY = re.compile(r"([\d.]+) times fewer bytes(?:; sum of all weights ([\d.]+))?")


def folder_options(example: Example, folder: Path) -> tuple[str, ...]:
    return () if example.interrupted is None else ("--folder", str(folder))


def summary(outputs: list[str]) -> tuple[str, str | None]:
    """(ratio, sum of all weights), which the first rank prints at the end."""
    found = [SUMMARY.search(output) for output in outputs]
    (match,) = [one for one in found if one is not None]
    return match[1], match[2]


@pytest.mark.parametrize("example", ALL, ids=lambda one: one.name)
def test_what_it_needs_is_there(example: Example) -> None:
    """All that its first lines import and define; steps with a framework are tried in `make slow`."""
    assert callable(runpy.run_path(str(example.path))["main"])


@pytest.mark.parametrize(
    "example", mostly_slow(ALL, lambda one: one.needs == "torch"), ids=lambda one: one.name
)
def test_a_few_steps(example: Example, tmp_path: Path) -> None:
    outputs = launch_forks(example.path, 2, *example.few, *folder_options(example, tmp_path))
    assert float(summary(outputs)[0]) > 2


@pytest.mark.slow
@pytest.mark.parametrize("example", ALL, ids=lambda one: one.name)
def test_all_of_it(example: Example, tmp_path: Path) -> None:
    began = time.perf_counter()
    outputs = launch(example.path, 2, *example.whole, *folder_options(example, tmp_path))
    assert float(summary(outputs)[0]) > 2
    assert time.perf_counter() - began < 90
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", "\n".join(outputs))]
    assert sum(losses[-3:]) < sum(losses[:3]), "it does not learn"


def kill_and_resume(example: Example, folder: Path, patience: float) -> str | None:
    """Kill one process some time after the first line about a step, the rest with it, and start again; the weights."""
    assert example.interrupted is not None
    options = (*example.interrupted, "--folder", str(folder))
    workers = start(example.path, 2, *options)
    try:
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            if "step 10" in line or "'loss'" in line:
                break
        time.sleep(patience)
        os.kill(workers[1].pid, signal.SIGKILL)
    finally:
        for worker in workers:
            worker.kill()
        finish(workers)
    return summary(launch_forks(example.path, 2, *options))[1]


def undisturbed(example: Example, folder: Path) -> str | None:
    assert example.interrupted is not None
    options = (*example.interrupted, "--folder", str(folder))
    return summary(launch_forks(example.path, 2, *options))[1]


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    example = ALL[0]
    wanted = undisturbed(example, tmp_path / "whole")
    assert wanted is not None
    assert kill_and_resume(example, tmp_path / "killed", patience=0.05) == wanted


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", RESUMABLE, ids=lambda one: one.name)
def test_twenty_kills(example: Example, tmp_path: Path) -> None:
    """Five of each, twenty and more together."""
    wanted = undisturbed(example, tmp_path / "whole")
    patience = random.Random(0)
    ends = [
        kill_and_resume(example, tmp_path / f"killed{number}", patience.uniform(0, 1.0))
        for number in range(5)
    ]
    assert ends == [wanted] * 5


def cells_of(notebook: Path) -> list[str]:
    return [
        "".join(cell["source"])
        for cell in json.loads(notebook.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda one: one.stem)
def test_a_notebook(notebook: Path, tmp_path: Path) -> None:
    """Its cells in turn; what the last line of a cell shows has a table where it is one of ours."""
    pytest.importorskip("matplotlib")
    cells = cells_of(notebook)
    program = "\n".join(
        [*cells, "assert '<table>' in simulation.stats()._repr_html_()", "print('the end')"]
    )
    script = tmp_path / "cells.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "the end" in done.stdout
    # Nothing that a run left behind is kept in the repository.
    content = json.loads(notebook.read_text())
    assert all(not cell.get("outputs") for cell in content["cells"])


@pytest.mark.slow
def test_a_notebook_in_a_kernel() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=90).execute()
        shown = [out for cell in notebook.cells for out in cell.get("outputs", ())]
        assert any("text/html" in out.get("data", {}) for out in shown)


def test_every_example_is_tried_and_told() -> None:
    page = (EXAMPLES / "README.md").read_text()
    names = {path.stem for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"))}
    assert {one.name for one in ALL} | {path.stem for path in EXAMPLES.glob("*.ipynb")} == names
    assert all(name in page for name in names)
