"""What a careless or hostile user types is answered in one sentence, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.plan import rule
from thinwire.tools.settings.sections import parse_value

LAUGHS = "\n".join(
    [
        "a: &a [x, x, x, x, x, x, x, x, x]",
        *(
            f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "training: *i",
    ]
)
FILES = {
    "binary.toml": bytes(range(256)),
    "binary.yaml": bytes(range(256)),
    "zero.toml": b"a = 1\0",
    "deep.toml": b"[training]\nx = " + b"[" * 5000 + b"]" * 5000,
    "dotted.toml": b"[training." + b"a." * 900 + b"a]\nx = 1",
    "deep.yaml": b"training: " + b"[" * 5000 + b"]" * 5000,
    "laughs.yaml": LAUGHS.encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_a_senseless_settings_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert main(["train", "digits", "--dry-run", "--config", str(path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"thinwire train: config is '{path}', which cannot be read: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train :x", "task is ':x'; it must be module:attribute"),
        ("train .x:y", "task is '.x:y'; it must be module:attribute"),
        ("train own_exit:TASK", "own_exit ends the program when it is imported"),
        ("train digits --out FILE/run", "out is 'FILE/run', which cannot be written to"),
        ("train digits --out /proc/run", "out is '/proc/run', which cannot be written to"),
        ("train digits --ledger FOLDER/no/l.csv", "ledger is 'FOLDER/no/l.csv'; it must be a file in"),
        ("train digits --method powersgd --rank 100000000000000000000", "it must be at most 65536"),
        ("train digits --workers 100000000000000000000", "it must be at most 65536"),
        ("train digits --seed 100000000000000000000", "it must be at most 9223372036854775807"),
        ("train digits --config /proc/self/mem", "config is '/proc/self/mem', which cannot be read"),
        ("bench step --workers 99999999999", "workers is 99999999999; it must be at most 65536"),
        ("bench exchange --ranks 99999999999", "ranks is 99999999999; it must be at most 65536"),
        ("plan FOLDER/profile.json", "profile is 'FOLDER/profile.json', which cannot be read"),
        ("train digits --timeout nan", "timeout is nan; it must be a positive number"),
        ("train digits --timeout 1e300", "timeout is 1e+300; it must be at most 31536000"),
        ("lab --timeout nan -- true", "timeout is nan; it must be a positive number"),
        ("lab --timeout inf -- true", "timeout is inf; it must be a positive number"),
        ("lab --counters FOLDER/no/c.json -- true", "counters is 'FOLDER/no/c.json'; it must be a file"),
        ("bench select --csv FOLDER/no/c.csv", "csv is 'FOLDER/no/c.csv'; it must be a file in a folder"),
        ("bench wire --csv FOLDER/no/c.csv", "csv is 'FOLDER/no/c.csv'; it must be a file in a folder"),
        ("bench wire --csv FOLDER", "csv is 'FOLDER'; it must be a file in a folder"),
        ("bench step --out FILE", "out is 'FILE'; it must be a folder that can be written to"),
        ("bench step --timeout nan", "timeout is nan; it must be a positive number"),
        ("bench compress --out FILE/x", "out is 'FILE/x'; it must be a folder that can be written to"),
        ("bench exchange --out FILE/x", "out is 'FILE/x'; it must be a folder that can be written to"),
    ],
)  # fmt: skip
def test_senseless_words(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_exit.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "profile.json").write_text("{")
    (tmp_path / "file").touch()
    places = {"FOLDER": str(tmp_path), "FILE": str(tmp_path / "file")}
    for name, place in places.items():
        words, said = words.replace(name, place), said.replace(name, place)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    "settings", [{"density": 0.1}, {"axis": 0}, {"feedback": True}, {"all_dimension": True}]
)
def test_a_rule_does_not_tune_what_goes_dense(settings: dict) -> None:
    with pytest.raises(UsageError, match=f"dense is True and {next(iter(settings))} is"):
        rule("*", dense=True, **settings)


def test_a_deep_value_stays_a_text() -> None:
    deep = "[" * 3000
    assert parse_value(deep) == deep
    assert parse_value("[[1], [2]]") == [[1], [2]]
