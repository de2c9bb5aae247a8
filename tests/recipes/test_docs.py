"""Every `thinwire train` and `thinwire compare` of the documentation is understood."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.observe.files import write_text
from thinwire.recipes.job import build_job
from thinwire.recipes.settings import to_toml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"thinwire (?:train|compare) [^`#\n]+")
# A sentence or a table that only names an option or a placeholder.
NOT_A_COMMAND = re.compile(r"[A-Z]{2,}|\.\.\.|--help")


def commands() -> Iterator[str]:
    for page in PAGES:
        for line in page.read_text().splitlines():
            is_code = line.startswith("    ") or "`" in line
            for found in COMMAND.findall(line) if is_code else ():
                if not NOT_A_COMMAND.search(found):
                    yield re.split(r"\s[>|&\\]", found)[0].strip()


@pytest.fixture
def _beside_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the pages speak of."""
    text = (ROOT / "docs" / "training.md").read_text()
    for name, language in (("mine.py", "python"), ("mine.toml", "toml")):
        (block,) = re.findall(rf"```{language}\n(# {name}.*?)```", text, re.S)
        (tmp_path / name).write_text(block)
    job = build_job("train", {"task": {"name": "digits"}}, out=tmp_path)
    for run in ("first", "table"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        write_text(tmp_path / "runs" / run / "config.toml", to_toml(job.to_settings()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])


@pytest.mark.usefixtures("_beside_the_examples")
@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_a_command_of_the_documentation(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("_beside_the_examples")
def test_the_file_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--config", "mine.toml", "--dry-run"]) == 0, capsys.readouterr().err
