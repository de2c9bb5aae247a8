"""The release workflow speaks of what there is: the files, and the Pythons that pyproject.toml names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_every_python_that_is_named_is_tried() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    (matrix,) = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r"3\.\d+", matrix) == named
    lowest = re.search(r'requires-python = ">=(.*)"', PROJECT)
    assert lowest is not None and lowest[1] == named[0]
    # The oldest is what lint and types hold the code to.
    assert f'target-version = "py{named[0].replace(".", "")}"' in PROJECT
    assert f'python_version = "{named[0]}"' in PROJECT


def test_the_files_that_it_names_are_there() -> None:
    for name in ("constraints.txt", "thinwire/version.py", "tests/release/smoke.py"):
        assert name in WORKFLOW and (ROOT / name).is_file()
