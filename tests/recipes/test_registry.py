from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.recipes.job import build_job
from thinwire.recipes.trained_methods import build_trained as build_method
from thinwire.tools.methods import METHODS, Preset


def build(names: list[str], settings: dict[str, Any]) -> list[Any]:
    """The methods of a comparison that gives all of them the same settings."""
    task = {"name": "digits"}
    job = build_job(
        "compare", {"task": task, "method": settings, "compare": {"methods": names}}, out=Path()
    )
    return [cell.build_method(steps_per_epoch=1) for cell in job.cells()]


@pytest.mark.parametrize("name", METHODS)
def test_every_name_builds_with_its_defaults(name: str) -> None:
    assert isinstance(build_method(name, {}), METHODS[name].kind)


def test_settings_go_to_the_methods_that_have_them() -> None:
    assert build(["dense", "topk", "adtopk"], {"density": 0.05, "axis": "published"}) == [
        tw.Dense(),
        tw.TopK(density=0.05),
        tw.ADTopK(density=0.05, axis="published"),
    ]


def test_a_name_can_stand_for_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "adtopk-published", Preset(tw.ADTopK, axis="published"))
    assert build_method("adtopk-published", {}) == tw.ADTopK(axis="published")
    assert build_method("adtopk-published", {"axis": 0}) == tw.ADTopK(axis=0)


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        ([], {}, "methods is empty; name at least one of dense, topk, adtopk"),
        (["topk", "topk"], {}, "methods names 'topk' twice"),
        (["adtop"], {}, r"method is 'adtop'; it must be one of dense, .*adtopk\?\)"),
        (["zzz"], {}, "method is 'zzz'; it must be one of dense, topk, adtopk"),
        (["dense"], {"density": 0.1}, r"density is 0\.1, but dense has no such setting"),
        (["dense", "acpsgd"], {"density": 0.1}, "but none of dense, acpsgd has such a setting"),
        (["topk"], {"density": 2}, "density is 2; it must be a number in"),
        (["topk"], {"values": "int3"}, "values is 'int3'; it must be one of"),
        (["adtopk"], {"axis": "x"}, "axis is 'x'; it must be"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    names: list[str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(names, settings)
