"""Every command of the documentation is run, or understood by its own parser (`--dry-run`) where it takes long or needs
data, a GPU, root or a cluster. A command that nothing here knows fails."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template
from unittest import mock

import pytest
from torch.distributed.run import parse_args

import thinwire
from tests.pages import PAGES, ROOT, Command, read_commands, read_page, split_page
from thinwire.cli import COMMANDS, GROUPS, main
from thinwire.cli import Command as Entry
from thinwire.recipes.job import build_job
from thinwire.tools.files import write_text
from thinwire.tools.settings.sections import to_toml

Words = list[str]

AS_THEY_ARE = {"--list", "--dry-run", "--print-launch", "--phases"}
"""Options with which a command of thinwire ends at once."""
PLACEHOLDERS = {
    "COMMAND": "true",
    "DATA": "data",
    "HOST:29500": "host1:29500",
    "N": "4",
    "NAME": "topk",
    "PRESET": "digits",
    "module:function": "tests.bench.step_models:tiny",
    "R": "1gbit",
    "RUN/config.toml": "runs/first/config.toml",
}
THE_READERS = ("train.py", "script.py")
QUICK = ("thinwire.bench.plots", "thinwire.bench.compress_plots")
TAKE_WHAT_MAIN_TAKES = (
    "benchmarks/dimensions.py",
    "benchmarks/partial_rows.py",
    "benchmarks/ternary.py",
    "tests.methods.conservation",
)
"""Scripts without a parser."""
IN_A_LAB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.64.0.1", "MASTER_PORT": "29500"}
NEED_A_CLUSTER = {
    "sbatch job.sh",
    "sbatch --nodes 4 job.sh",
    "qsub job.sh",
    "qsub -v REMOTE_SHELL=pbs_tmrsh ...",
}
"""What only the cluster's own programs can judge; tests/tools/test_clusters.py runs such scripts."""


class Understood(Exception):
    """The arguments were parsed; nothing more is wanted."""


def check(words: Words) -> None:
    """Run a command, or let its parser judge it."""
    program = words[0]
    assert program in CHECKS, f"nothing in {Path(__file__).name} checks {program!r}: {words}"
    CHECKS[program]([PLACEHOLDERS.get(word, word) for word in words[1:]])


def check_thinwire(words: Words) -> None:
    if words[0] == "lab" or "--" in words:
        end = words.index("--") if "--" in words else len(words)
        if "--clean" in words and os.geteuid() != 0:
            pytest.skip("reading what labs left needs root")
        assert main([*words[:end], "--dry-run", *words[end:]]) == 0
        if end < len(words):
            check(words[end + 1 :])
    elif AS_THEY_ARE & set(words):
        assert main(words) == 0
    else:
        assert main([*words, "--dry-run"]) == 0


def check_torchrun(words: Words) -> None:
    given = parse_args(words)
    script = ["-m", given.training_script] if given.module else [given.training_script]
    check(["python", *script, *given.training_script_args])


def check_python(words: Words) -> None:
    """The script's own parser takes the arguments, its main function where it has none, or all of it if it is quick."""
    if words[:2] == ["-m", "thinwire"]:
        check_thinwire(words[2:])
        return
    name, *arguments = words[1:] if words[0] == "-m" else words
    path = Path(name)
    if words[0] == "-m":
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"there is no module {name}"
        path = Path(spec.origin)
    if name in THE_READERS:
        assert path.is_file()
        return
    if name in TAKE_WHAT_MAIN_TAKES:
        inspect.signature(runpy.run_path(str(path))["main"]).bind(*arguments)
        return
    sys.argv = [str(path), *arguments]
    if name in QUICK:
        runpy.run_path(str(path), run_name="__main__")
        return
    with stopping_after_parsing(), pytest.raises(Understood):
        runpy.run_path(str(path), run_name="__main__")


@contextmanager
def stopping_after_parsing() -> Iterator[None]:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser) -> None:
        parse(self)
        raise Understood

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        yield


def check_make(words: Words) -> None:
    subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def check_shell(words: Words) -> None:
    if words[0] == "-c":
        check(shlex.split(Template(words[1]).substitute(IN_A_LAB)))
    else:
        subprocess.run(["bash", "-n", *words], check=True)


def check_pip(words: Words) -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^(\w+) = \[", section.partition("\n[")[0], re.M)
    assert words[0] == "install"
    for package in words[1:]:
        wanted = re.fullmatch(r"(?:path/to/)?thinwire(?:\[(.+)\])?", package)
        assert wanted, f"{package} is not ours"
        assert set((wanted[1] or "cli").split(",")) <= set(extras)


CHECKS: dict[str, Callable[[Words], None]] = {
    "thinwire": check_thinwire,
    "torchrun": check_torchrun,
    "python": check_python,
    "python3": check_python,
    "make": check_make,
    "bash": check_shell,
    "sh": check_shell,
    "pip": check_pip,
    "true": lambda words: None,
}


def shown() -> list[Command]:
    """Each command once, whatever page it is on."""
    programs = (*CHECKS, *(text.split()[0] for text in NEED_A_CLUSTER))
    found = [command for page in PAGES for command in read_page(page, programs)]
    return list({command.text: command for command in found}.values())


@pytest.fixture
def _at_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with all that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    write_what_readers_have(tmp_path)
    lay_out_repository(tmp_path)


def write_what_readers_have(folder: Path) -> None:
    """Their own scripts, the examples of the pages, and what earlier commands left."""
    for name in (*THE_READERS, "job.sh"):
        (folder / name).touch()
    own = "import torch\ndef function(device, batch): return torch.nn.Linear(2, 1), torch.ones(batch, 2)\n"
    (folder / "module.py").write_text(own)
    for page, name, language in (
        ("training", "mine.py", "python"),
        ("training", "mine.toml", "toml"),
        ("own-method", "sparsifier.py", "python"),
        ("clusters", "node1", "text"),
    ):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        (block,) = re.findall(rf"```{language}\n((?:# )?{name}.*?)```", text, re.S)
        (folder / ("hosts.txt" if name == "node1" else name)).write_text(block)
    job = build_job("train", {"task": {"name": "digits"}}, out=folder)
    for run in ("first", "table"):
        (folder / "runs" / run).mkdir(parents=True)
        write_text(folder / "runs" / run / "config.toml", to_toml(job.to_settings()))
    for run, results in (("bench-step", "h200_step"), ("bench-compress", "compress")):
        copy_rows(results, folder / "runs" / run)


def lay_out_repository(folder: Path) -> None:
    """What the commands read of it; what they write, they write here."""
    for name in ("docs", "benchmarks"):
        (folder / name).mkdir()
    (folder / ".ci").symlink_to(ROOT / ".ci")
    for path in (ROOT / "benchmarks").iterdir():
        if path.name != "results":
            (folder / "benchmarks" / path.name).symlink_to(path)
    copy_rows("h200_step", folder / "benchmarks" / "results" / "h200_step")


def copy_rows(results: str, target: Path) -> None:
    target.mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "results" / results / "rows.json", target)


@pytest.mark.usefixtures("_at_the_readers")
@pytest.mark.parametrize("command", shown(), ids=lambda command: command.text)
def test_a_command_of_the_documentation(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {*GROUPS, *(entry.name for entry in COMMANDS)}
    only_named = command.inline and " ".join(command.words[1:]) in names
    if not only_named and command.text not in NEED_A_CLUSTER:
        check(command.words)
    if "--print-launch" in command.words:
        subprocess.run(["bash", "-n"], input=capsys.readouterr().out, text=True, check=True)


PUBLIC_NAME = re.compile(r"\btw((?:\.[A-Za-z_]\w*)+)")
FILE = re.compile(r"(?<![\w./-])(?:thinwire|tests|benchmarks|docs)/[\w./-]*\w")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_and_files_of_the_documentation_exist(page: Path) -> None:
    text = page.read_text()
    for path in PUBLIC_NAME.findall(text):
        found: object = thinwire
        for name in path.strip(".").split("."):
            assert hasattr(found, name), f"tw{path}"
            found = getattr(found, name)
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []


@pytest.mark.usefixtures("_at_the_readers")
@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_the_example_of_a_command(entry: Entry) -> None:
    function = getattr(importlib.import_module(f"thinwire.{entry.module}"), entry.function)
    (example,) = re.findall(
        rf"^(?:Example: )?(thinwire {entry.name} .*)", inspect.getdoc(function) or "", re.M
    )
    check(shlex.split(example))


@pytest.mark.usefixtures("_at_the_readers")
def test_the_file_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--config", "mine.toml", "--dry-run"]) == 0, capsys.readouterr().err


def test_the_program_of_simulated_workers(capsys: pytest.CaptureFixture[str]) -> None:
    blocks, _ = split_page((ROOT / "docs" / "simulate.md").read_text())
    program = next(block.text for block in blocks if block.language == "python")
    exec(program, {})
    assert "8 workers: " in capsys.readouterr().out


PAGE = """
Text with `thinwire lab
--check`, a name `p.grad`, and `sudo python a.py`.

    thinwire train digits \\
        --tiny    # a comment

    # an empty line ends no block
    docker run it

- a list
    that goes on

Python:

    handle = tw.attach(ddp, tw.TopK())

```bash
OMP_NUM_THREADS=1 make test > log
```
```text
not a command
```
"""


def test_commands_are_found_wherever_a_page_shows_them() -> None:
    found = list(read_commands("page", PAGE, tuple(CHECKS)))
    assert [" ".join(command.words) for command in found] == [
        "thinwire train digits --tiny",
        "docker run it",
        "make test",
        "thinwire lab --check",
        "python a.py",
    ]
    assert [command.inline for command in found] == [False] * 3 + [True] * 2


@pytest.mark.usefixtures("_at_the_readers")
@pytest.mark.parametrize(
    "text",
    [
        "docker run it",
        "sbatch other.sh",
        "thinwire lab --hosts 2 --rate 1gbit -- docker run it",
        "python benchmarks/nowhere.py",
        "python -m thinwire.nowhere",
        "python benchmarks/dimensions.py",
        "make tea",
        "pip install 'thinwire[nothing]'",
        "thinwire train digits --method nothing",
        "thinwire bench step --rates fast",
        "torchrun --nproc-per-node 2 -m thinwire compare nothing",
    ],
)
def test_a_command_that_cannot_work_or_is_not_known_fails(text: str) -> None:
    with pytest.raises((AssertionError, OSError, TypeError, subprocess.CalledProcessError)):
        check(Command("page", text).words)
