"""Settings: files that compose in order, and overrides of any of their fields.

    [task]         name, or data and model; data_dir, synthetic, tiny, download
    [method]       name, and any field of the method; in `compare` for those methods that have it
    [methods.dgc]  the same for one method only
    [training]     the fields of `Training`
    [run]          the fields of `Running`
    [compare]      methods, densities, seeds

A later file, then a later option, replaces single fields of an earlier one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.recipes.names import hint

Settings = dict[str, Any]
"""Sections of plain values: text, numbers, truth values, lists, tables."""

FRAGMENTS = Path(__file__).parent / "configs"
PYTHON_WORDS = {"True": True, "False": False}
SECTIONS = ("task", "method", "methods", "training", "run", "compare")


def list_fragments() -> list[str]:
    return sorted(path.stem for path in FRAGMENTS.glob("*.toml"))


def find_file(name: str) -> Path:
    """A file by its path, or one that comes with thinwire by its name."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = FRAGMENTS / f"{name}.toml"
    if shipped.is_file():
        return shipped
    known = list_fragments()
    raise UsageError(
        f"config is {name!r}, which is neither a file nor one of {', '.join(known)}{hint(name, known)}"
    )


def read_settings(name: str) -> Settings:
    path = find_file(name)
    text = path.read_text()
    try:
        content = parse_yaml(text) if path.suffix in (".yaml", ".yml") else parse_toml(text)
    except ValueError as error:
        first_line = str(error).splitlines()[0]
        raise UsageError(f"config is '{path}', which cannot be read: {first_line}") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"config is '{path}', which has no sections such as [training]")
    check_sections(content, f"'{path}'")
    return dict(content)


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


def check_sections(content: Mapping[str, Any], where: str) -> None:
    for section, values in content.items():
        if section not in SECTIONS:
            raise UsageError(
                f"{section} in {where} is no section; there are {', '.join(SECTIONS)}{hint(section, SECTIONS)}"
            )
        if not isinstance(values, Mapping):
            raise UsageError(
                f"{section} in {where} is {values!r}; it must be a section of settings"
            )


def parse_override(text: str) -> Settings:
    """'training.lr=0.1' as settings; the value as in JSON, Python or TOML, or else the text as it is."""
    name, found, value = text.partition("=")
    path = name.strip().split(".")
    if not found or len(path) < 2 or not all(path):
        raise UsageError(f"set is {text!r}; it must be section.name=value, such as training.lr=0.1")
    if path[0] not in SECTIONS:
        raise UsageError(
            f"set is {text!r}; {path[0]} is no section, there are {', '.join(SECTIONS)}{hint(path[0], SECTIONS)}"
        )
    nested = parse_value(value.strip())
    for key in reversed(path):
        nested = {key: nested}
    return dict(nested)


def parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text.startswith(("[", "{")):
        # As it would stand in a file.
        with contextlib.suppress(ValueError):
            return parse_toml(f"value = {text}")["value"]
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


def check_names(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that a section does not have."""
    allowed = list(known)
    for name in given:
        if name not in allowed:
            near = hint(name, allowed)
            suffix = near or f"; {section} has {', '.join(allowed)}"
            raise UsageError(f"{section}.{name} is no setting{suffix}")


# -- writing ---------------------------------------------------------------------------------------------------


def to_toml(settings: Mapping[str, Any]) -> str:
    """The settings as TOML; what is None is left out."""
    sections = []
    for name, values in settings.items():
        tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
        if name == "methods":
            sections += [write_section(f"methods.{key}", value) for key, value in tables.items()]
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
