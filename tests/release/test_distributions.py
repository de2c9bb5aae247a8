"""The sdist and the wheel: what is in them, and that the wheel trains where there is torch and nothing else."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from thinwire.cli import COMMANDS
from thinwire.version import __version__

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
EXTRAS = ("numpy", "sklearn", "matplotlib", "PIL", "typer", "rich", "pyroute2", "transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def build(what: str, source: Path, target: Path) -> Path:
    """Build it in a copy of the sources, as pip does; `what` is sdist or wheel."""
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True
    )
    return target / done.stdout.splitlines()[-1]


def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("what belongs to the package is read from git")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that nothing can be missing there either."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("wheel"))


def test_both_hold_the_package_and_nothing_else(sdist: Path, wheel: Path) -> None:
    ours = {name for name in tracked_files() if name.startswith("thinwire/")}
    some = {"thinwire/py.typed", "thinwire/recipes/presets.toml"}
    assert some <= ours and any(name.endswith(".cu") for name in ours)
    assert {"thinwire/report/page.css", "thinwire/report/page.js"} <= ours
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert {name for name in inside if ".dist-info/" not in name} == ours
    assert any(name.endswith("licenses/LICENSE") for name in inside)

    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert ours <= names
    beside = {name for name in names - ours if ".egg-info/" not in name}
    assert beside == {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg",
    }  # fmt: skip


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and torch only; torch is this environment's own, by links."""
    folder = tmp_path_factory.mktemp("bare")
    packages = folder / "torch-only"
    packages.mkdir()
    link_with_dependencies("torch", packages)
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "torch-only.pth").write_text(f"{packages}\n")
    # It asks for torch, and must find it: nothing can be fetched.
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-index", "--quiet", wheel], check=True)
    return environment / "bin"


def link_with_dependencies(name: str, folder: Path) -> None:
    """Link what an installed package and the packages that it always needs consist of."""
    if name == "numpy":
        raise AssertionError("torch needs numpy now: there is nothing to be tested without it")
    found = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "bin")}
    for top in tops - {"__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(found.locate_file(top))
    for line in found.requires or ():
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            link_with_dependencies(needed.name, folder)


def ask(bare: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Isolated: neither this folder nor PYTHONPATH may lend it a module.
    command = [bare / "python", "-I", *words]
    return subprocess.run(command, cwd=bare, capture_output=True, text=True, timeout=300)


def test_the_environment_has_no_extra(bare: Path) -> None:
    code = f"from importlib.util import find_spec; print([n for n in {EXTRAS} if find_spec(n)])"
    assert ask(bare, "-c", code).stdout.strip() == "[]"
    where = ask(bare, "-c", "import thinwire; print(thinwire.__file__)").stdout
    assert where.startswith(str(bare.parent))


def test_two_ranks_train_save_and_load(bare: Path) -> None:
    done = ask(bare, str(SMOKE))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank \d: loss .* times fewer bytes", done.stdout)) == 2


def test_the_command_says_what_it_is(bare: Path) -> None:
    assert ask(bare, "-m", "thinwire", "--version").stdout == f"thinwire {__version__}\n"
    program = subprocess.run([bare / "thinwire", "--help"], capture_output=True, text=True)
    assert program.returncode == 0 and "thinwire compare digits" in program.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda entry: entry.name)
def test_a_command_names_all_that_it_lacks_at_once(bare: Path, command) -> None:
    done = ask(bare, "-m", "thinwire", *command.name.split(), "--help")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    missing = dict.fromkeys(("typer", "rich", *command.needs))
    assert all(name in done.stderr for name in missing)
    assert f"pip install 'thinwire[{command.extra}]'" in done.stderr
