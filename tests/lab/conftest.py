"""Fixtures of the lab's tests: a run directory of their own, and proof that nothing is left."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec
from thinwire.lab.processes import NAMESPACE_FOLDER


@functools.cache
def why_no_lab() -> str:
    """Return why this machine cannot build a lab, or nothing if it can."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, THINWIRE_RUN_DIR=folder),
    ):
        try:
            with Lab(LabSpec(hosts=1, rate="100mbit")):
                return ""
        except UsageError as error:
            return str(error)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") is not None and why_no_lab():
        pytest.skip(why_no_lab())


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the records of a test apart, and fail it if a lab is still on record at its end."""
    folder = tmp_path / "run"
    monkeypatch.setenv("THINWIRE_RUN_DIR", str(folder))
    yield folder
    assert not folder.exists() or not list(folder.iterdir())


def names_left(lab: str) -> list[str]:
    """Return the namespaces of a lab and the interfaces of this machine that carry its name."""
    namespaces = NAMESPACE_FOLDER.iterdir() if NAMESPACE_FOLDER.exists() else iter(())
    interfaces = Path("/sys/class/net").iterdir()
    return [path.name for path in (*namespaces, *interfaces) if path.name.startswith(lab)]
