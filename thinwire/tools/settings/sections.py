"""Files of settings: TOML or YAML with sections, which compose in order."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError

Settings = dict[str, Any]
"""Sections of plain values."""

DEEPEST = 20
"""Tables and lists inside each other."""
MOST_VALUES = 10_000
"""On one level."""
TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"
PYTHON_WORDS = {"True": True, "False": False}


def read_file(path: Path) -> Any:
    """The content of a file, YAML by its suffix, else TOML; ValueError if it is neither."""
    parse = parse_yaml if path.suffix in (".yaml", ".yml") else parse_toml
    return parse_plain(parse, path.read_text())


def parse_plain(parse: Callable[[str], Any], text: str) -> Any:
    """A value that everybody can walk through; ValueError if it is deeper or larger than settings can be."""
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level for inner in insides(one)]
        # A YAML file of a few lines can stand for more values than fit into memory.
        if len(level) > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES} values")
    if level:
        raise ValueError(TOO_DEEP)
    return value


def insides(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def parse_toml(text: str) -> Any:
    module = next((name for name in ("tomllib", "tomli") if find_spec(name) is not None), None)
    if module is None:
        raise UsageError(
            "TOML files need Python 3.11 or tomli; install it with pip install 'thinwire[train]'"
        )
    return importlib.import_module(module).loads(text)


def parse_yaml(text: str) -> Any:
    if find_spec("yaml") is None:
        raise UsageError("YAML files need PyYAML; install it with pip install pyyaml, or use TOML")
    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_value(text: str) -> Any:
    """A value as in JSON, Python or TOML, or else the text as it is."""
    with contextlib.suppress(ValueError):
        return parse_plain(json.loads, text)
    if text.startswith(("[", "{")):
        with contextlib.suppress(ValueError):
            return parse_plain(parse_toml, f"value = {text}")["value"]
    return PYTHON_WORDS.get(text, text)


def compose(layers: Iterable[Mapping[str, Any]]) -> Settings:
    """Later layers replace single fields of earlier ones; tables are merged, everything else is replaced."""
    result: Settings = {}
    for layer in layers:
        for key, value in layer.items():
            before = result.get(key)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                value = compose([before, value])
            result[key] = value
    return result


def to_toml(settings: Mapping[str, Any]) -> str:
    """The settings as TOML; what is None is left out, and a section of tables becomes a section for each."""
    sections = []
    for name, values in settings.items():
        if values and all(isinstance(value, Mapping) for value in values.values()):
            sections += [write_section(f"{name}.{key}", value) for key, value in values.items()]
        else:
            sections.append(write_section(name, values))
    return "\n".join(section for section in sections if section)


def write_section(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {to_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join([f"[{name}]", *lines, ""]) if lines else ""


def to_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {to_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    # Of what JSON and TOML both call text, JSON's form is the one Python can write.
    return json.dumps(str(value))
