from __future__ import annotations

import pytest

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.methods.registry import METHODS, MethodOptions, Preset, build_method, build_methods


@pytest.mark.parametrize("name", METHODS)
def test_every_name_builds_with_its_defaults(name: str) -> None:
    assert isinstance(build_method(name, MethodOptions()), METHODS[name].kind)


def test_options_go_to_the_methods_that_take_them() -> None:
    options = MethodOptions(density=0.05, axis="published")
    built = build_methods(["dense", "topk", "adtopk"], options)
    assert built == {
        "dense": tw.Dense(),
        "topk": tw.TopK(density=0.05),
        "adtopk": tw.ADTopK(density=0.05, axis="published"),
    }


def test_a_name_can_stand_for_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "adtopk-published", Preset(tw.ADTopK, axis="published"))
    assert build_method("adtopk-published", MethodOptions()) == tw.ADTopK(axis="published")
    assert build_method("adtopk-published", MethodOptions(axis=0)) == tw.ADTopK(axis=0)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], MethodOptions(), "methods is empty; name at least one of dense, topk, adtopk"),
        (["topk", "topk"], MethodOptions(), "methods names 'topk' twice"),
        (["adtop"], MethodOptions(), r"method is 'adtop'; it must be one of dense, .*adtopk\?\)"),
        (["zzz"], MethodOptions(), "method is 'zzz'; it must be one of dense, topk, adtopk"),
        (["dense"], MethodOptions(density=0.1), "density is 0.1, but dense has no such setting"),
        (["topk"], MethodOptions(density=2), "density is 2; it must be a number in"),
        (["topk"], MethodOptions(values="int3"), "values is 'int3'; it must be one of"),
        (["adtopk"], MethodOptions(axis="x"), "axis is 'x'; it must be"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    names: list[str], options: MethodOptions, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build_methods(names, options)
