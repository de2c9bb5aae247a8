"""The public face: few names on top, parts in rooms, and help() that tells every parameter."""

from __future__ import annotations

import inspect
import re

import pytest

import thinwire as tw

ROOMS = [tw.select, tw.exchange, tw.memory, tw.wire, tw.optim]
PUBLIC = {
    f"{room.__name__}.{name}": getattr(room, name)
    for room in (tw, *ROOMS)
    for name in room.__all__
    if inspect.isclass(getattr(room, name)) or inspect.isfunction(getattr(room, name))
}


def parameters_of(thing) -> list[str]:
    target = thing.__init__ if inspect.isclass(thing) else thing
    if inspect.isclass(thing) and "__init__" not in vars(thing) and issubclass(thing, Exception):
        return []
    found = inspect.signature(target).parameters.values()
    return [
        p.name
        for p in found
        if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def test_few_names_on_top():
    presets = {"DiLoCo", "StreamingDiLoCo", "SparseLoCo"}
    others = [n for n in tw.__all__ if not is_method(getattr(tw, n)) and n != "__version__"]
    others = [n for n in others if n not in presets]
    assert len(others) <= 31, others


def is_method(thing) -> bool:
    return inspect.isclass(thing) and issubclass(thing, tw.Method)


@pytest.mark.parametrize("name", PUBLIC)
def test_help_tells_every_parameter(name):
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    missing = [p for p in parameters_of(thing) if not re.search(rf"\b{p}\b", text)]
    assert not missing, f"help({name}) says nothing of {', '.join(missing)}"


def test_every_public_name_is_there():
    for room in (tw, *ROOMS):
        assert all(hasattr(room, name) for name in room.__all__)
        assert sorted(room.__all__) == sorted(set(room.__all__))


def text_of(thing, argument: str) -> str:
    """The first sentence that help() has of an argument."""
    text = inspect.getdoc(thing).partition("Args:")[2]
    found = re.search(rf"^ +{argument}: (.*?)(\.|\n\n)", text, re.DOTALL | re.MULTILINE)
    return "" if found is None else " ".join(found[1].split())


@pytest.mark.parametrize(
    "argument", ["grad_scaler", "skippable", "skipped", "checksum", "watch", "on_difference"]
)
def test_the_same_argument_is_described_in_the_same_words(argument):
    doors = [tw.attach, tw.DistributedOptimizer, tw.simulate]
    texts = {text_of(one, argument) for one in doors if argument in parameters_of(one)}
    assert len(texts) == 1 and texts != {""}
