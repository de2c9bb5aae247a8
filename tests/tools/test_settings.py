"""Settings dataclasses as options and files: the mechanism itself; tests/recipes/test_settings.py has the recipes'."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

import thinwire as tw
from thinwire.cli import COMMANDS, build_command
from thinwire.errors import UsageError
from thinwire.tools.methods import METHODS, build_method, keep_taken
from thinwire.tools.settings.building import build, check_fields, to_plain
from thinwire.tools.settings.fields import EITHER_WAY, describe
from thinwire.tools.settings.kinds import Density, Folder, Positive
from thinwire.tools.settings.options import Said, command, said
from thinwire.tools.settings.sections import parse_toml, to_toml

COLOURS = ("red", "green")


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Positive
    """How large."""


@dataclass(frozen=True, kw_only=True)
class Painted:
    """Settings of every kind."""

    colour: Literal["red", "green"] = "red"
    """One of {COLOURS}."""
    layers: Positive = 1
    """How often
    it is painted."""
    shares: Annotated[tuple[float, ...], "--share", "PARTS"] = (0.5, 0.25)
    names: tuple[str, ...] | None = None
    thick: Density | None = None
    axis: int | str = "auto"
    dry: bool = True
    bright: Annotated[bool, EITHER_WAY] = False
    out: Folder | None = None
    part: Part | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_fields_say_what_is_allowed_and_what_they_mean() -> None:
    fields = describe(Painted)
    assert fields["colour"].text == "One of red, green."
    assert fields["layers"].text == "How often it is painted."
    assert fields["colour"].choices == ("red", "green")
    assert (fields["shares"].option, fields["shares"].metavar) == ("--share", "PARTS")
    assert (fields["thick"].optional, fields["thick"].kinds) == (True, (float,))
    assert fields["part"].part is Part


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"colour": "blue"}, "colour is 'blue'; it must be one of 'red', 'green'"),
        ({"layers": 0}, "layers is 0; it must be a whole number of at least 1"),
        ({"layer": 1}, r"paint.layer is no setting \(did you mean layers\?\)"),
        ({"xyz": 1}, "paint.xyz is no setting; paint has colour, layers"),
        ({"shares": 0.5}, "shares is 0.5; it must be a list of numbers"),
        ({"names": [1]}, "names is 1; it must be a list of names"),
        ({"thick": 2}, r"thick is 2; it must be a number in \(0, 1\]"),
        ({"dry": 1}, "dry is 1; it must be True or False"),
        ({"out": 1}, "out is 1; it must be the path of a folder"),
        ({"part": {"sice": 1}}, r"part.sice is no setting of Part \(did you mean size\?\)"),
        ({"part": {}}, "part.size is missing; Part needs it"),
        ({"colour": {"a": 1}}, "colour is {'a': 1}; it holds no part with settings of its own"),
    ],
)
def test_what_cannot_be_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(Painted, values, where="paint")


def test_plain_values_become_what_the_fields_want_and_back() -> None:
    plain = {"shares": [1, 2], "out": "a/b", "part": {"size": 3}, "thick": "none", "names": None}
    built = build(Painted, plain, where="paint")
    assert built == Painted(shares=(1, 2), out=Path("a/b"), part=Part(size=3))
    again = parse_toml(to_toml({"paint": to_plain(built)}))["paint"]
    assert build(Painted, again, where="paint") == built
    other = build(Painted, {"layers": 2}, where="paint", base=built)
    assert (other.layers, other.out) == (2, built.out)


def run(*arguments: str) -> tuple[Painted, Said]:
    seen: list[Any] = []

    @command
    def paint(*, painted: Painted, part: Said = said(Part)) -> None:
        seen.extend([painted, part])

    app = typer.Typer()
    app.command()(paint)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return seen[0], seen[1]


def test_options_are_the_fields() -> None:
    assert run() == (Painted(), {})
    typed = [
        "--share",
        "1,2",
        "--names",
        "a,b",
        "--axis",
        "-1",
        "--no-dry",
        "--bright",
        "--out",
        "x",
        "--size",
        "4",
    ]
    painted = Painted(
        shares=(1.0, 2.0), names=("a", "b"), axis=-1, dry=False, bright=True, out=Path("x")
    )
    assert run(*typed) == (painted, {"size": 4})
    assert run("--bright", "--no-bright")[0].bright is False
    with pytest.raises(UsageError, match="share is 'a'; it must be numbers with commas between"):
        run("--share", "a")


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_every_option_is_explained_in_a_panel(entry: Any) -> None:
    shown = [
        option for option in build_command(entry).params if not getattr(option, "hidden", False)
    ]
    assert shown and all(option.help for option in shown)


def test_methods_are_built_strictly_from_their_names() -> None:
    assert build_method("efsignsgd") == tw.SignSGD(memory=tw.memory.Residual())
    assert build_method("adtopk-threshold", {"interleave": 3}) == tw.ADTopK(
        interleave=3, threshold=True
    )
    assert build_method("dense", {"dtype": "bfloat16"}).dtype is not None  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="rank is 2, but topk has no such setting"):
        build_method("topk", {"rank": 2})
    assert keep_taken("topk", rank=2, density=0.1, values=None) == {"density": 0.1}
    assert {name: preset.kind for name, preset in METHODS.items()}["dgc"] is tw.DGC


def test_the_help_of_train_needs_no_torch() -> None:
    code = (
        "import sys; from thinwire.cli import main; main(['train', '--help']); "
        "import thinwire.lab.command; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
