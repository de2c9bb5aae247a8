from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lanes import slow
from thinwire.cli import COMMANDS, main
from thinwire.recipes.report import SETTINGS_FILE
from thinwire.version import __version__


def fail(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused; returns its one sentence."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        ([], "thinwire compare digits --workers 4"),
        (["--help"], "thinwire compare digits --workers 4"),
        (["train", "--help"], "thinwire train digits --method adtopk --density 0.01 --workers 4"),
        (["compare", "-h"], "thinwire compare digits --workers 4 --methods dense,topk,adtopk"),
        (["lab", "--help"], "thinwire lab --hosts 4 --rate 10gbit"),
    ],
)
def test_help_shows_a_real_example(
    arguments: list[str], example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert example in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for entry in COMMANDS:
        *group, word = entry.name.split()
        main([*group, "--help"])
        shown = capsys.readouterr().out
        assert re.search(rf"\b{word}\b +{entry.summary.split()[0]}", shown)


@pytest.mark.parametrize("option", ["--help", "--version", "bench --help"])
def test_what_is_asked_without_a_command_needs_neither_torch_nor_extras(option: str) -> None:
    script = f"""
import sys
for name in ("typer", "rich", "click", "numpy", "torch"):
    sys.modules[name] = None  # an import of it fails
sys.argv = ["thinwire", *{option.split()!r}]
from thinwire.cli import main
code = main()
assert sys.modules["torch"] is None
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("Usage: thinwire", "thinwire "))
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"thinwire {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian digits", "thinwire trian: there is no command trian; did you mean train?"),
        ("quux", "there is no command quux; thinwire --help lists what there is"),
        ("bench stp", "thinwire bench stp: there is no command stp; did you mean step?"),
        ("--nope", "there is no option --nope; thinwire --help"),
        ("train", "missing argument 'TASK'"),
        ("train digits more", "unexpected extra argument"),
        ("train digits --densty 0.1", "there is no option --densty; did you mean --density?"),
        ("lab --hosst 2", "there is no option --hosst; did you mean --hosts?"),
        ("train digits --density", "'--density' requires an argument"),
        ("train digits --density abc", "--density is 'abc', which is not possible: "),
        ("train digits --density=abc", "--density is 'abc', which is not possible: "),
        ("train digits --density 0", "density is 0.0; it must be a number in (0, 1]"),
        ("train digits --density nan", "density is nan; it must be a number in (0, 1]"),
        ("train digits --workers two", "--workers is 'two', which is not possible: "),
        ("train digits --workers 0", "workers is 0; it must be a whole number of at least 1"),
        ("train digits --epochs 0", "epochs is 0; it must be a whole number of at least 1"),
        ("train digits --batch-size -1", "batch_size is -1; it must be"),
        ("train digits --lr 0", "lr is 0.0; it must be above 0"),
        ("train digits --seed -1", "seed is -1; it must be a whole number of at least 0"),
        ("train digits --axis x", "axis is 'x'; it must be 'auto', 'published' or an axis number"),
        ("train digits --values int3", "values is 'int3'; it must be one of"),
        ("train digits --method adtop", "method is 'adtop'; it must be one of dense, topk, adtopk"),
        (
            "train digits --method dense --density 0.1",
            "density is 0.1, but dense has no such setting\n",
        ),
        ("train digits --hosts f", "hosts is 'f', which goes only with --print-launch"),
        ("bench exchange --interface lo", "interface is 'lo', which goes only with --print-launch"),
        ("train digits --workers 2 --simulate-workers 4", "simulate_workers is 4; name only one"),
        ("bench step --rates fast", 'rate is "fast", but a rate is a number with kbit'),
        ("bench compress --device tpu --dry-run", "--device is 'tpu'; it must be cpu or cuda"),
        ("bench exchange --ranks 0", "ranks is 0; it must be a whole number of at least 1"),
        ("compare digits --methods dense,dense", "methods names 'dense' twice"),
        ("compare digits --methods ,", "methods is empty"),
        ("train digit", "task is 'digit'; it must be one of digits"),
        ("train no.such:TASK", "task is 'no.such:TASK', but there is no module 'no'"),
        ("train tests.recipes.own_tasks:NOT_A_TASK", "is not a Task"),
    ],
)
def test_what_is_typed_wrong_gets_one_sentence(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(arguments.split(), capsys)


def test_a_run_folder_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    said = fail(["train", "digits", "--out", str(tmp_path)], capsys)
    assert f"out is '{tmp_path}', which is there already" in said


def test_the_number_of_workers_is_torchruns_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "8")
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "localhost")
    monkeypatch.setitem(os.environ, "MASTER_PORT", "29500")
    said = fail(["train", "digits", "--workers", "4"], capsys)
    assert "workers is 4, but 8 were started already (WORLD_SIZE)" in said


# Whoever starts the tests may have had interrupts ignored.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from thinwire.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train", "there is no checkpoint to go on from (--checkpoint-every N makes them)"),
        slow(
            "compare", "thinwire compare --resume --out {out} does the runs that are not finished"
        ),
    ],
)
def test_an_interrupted_job_says_so(command: str, sentence: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [sys.executable, "-c", INTERRUPTIBLE, command, "digits", "--out", str(out)]
    job = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while not (out / SETTINGS_FILE).exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130
    assert f"thinwire {command}: interrupted; {sentence.format(out=out)}" in said


@pytest.mark.parametrize(
    ("arguments", "missing", "sentence"),
    [
        (
            ["bench", "wire"],
            "typer rich numpy",
            "typer, rich and numpy cannot be found; .* pip install 'thinwire\\[train\\]'",
        ),
        (
            ["train", "-h"],
            "sklearn",
            "sklearn cannot be found; .* pip install 'thinwire\\[train\\]'",
        ),
        (["lab", "-h"], "pyroute2", "pyroute2 cannot be found; .* pip install 'thinwire\\[lab\\]'"),
    ],
)
def test_a_missing_extra_is_named(
    arguments: list[str],
    missing: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in missing.split():
        monkeypatch.setitem(sys.modules, name, None)
    assert re.search(sentence, fail(arguments, capsys))
