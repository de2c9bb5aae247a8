"""Settings of a job: files and overrides with these sections.

    [task]         name, or data and model; data_dir, synthetic, tiny, download
    [method]       name, and any field of the method; in `compare` for those methods that have it
    [methods.dgc]  the same for one method only
    [training]     the fields of `Training`
    [run]          the fields of `Running`
    [compare]      methods, densities, seeds

A later file, then a later option, replaces single fields of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.tools.settings.names import hint
from thinwire.tools.settings.sections import DEEPEST, Settings, parse_value, read_file

FRAGMENTS = Path(__file__).parent / "configs"
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
    try:
        content = read_file(path)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UsageError(f"config is '{path}', which cannot be read: {first_line}") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"config is '{path}', which has no sections such as [training]")
    for section, values in content.items():
        check_section(f"{section} in '{path}' is no section;", section)
        if not isinstance(values, Mapping):
            raise UsageError(
                f"{section} in '{path}' is {values!r}; it must be a section of settings"
            )
    return dict(content)


def parse_override(text: str, option: str = "set") -> Settings:
    """'training.lr=0.1' as settings; `option` is where it was typed."""
    name, found, value = text.partition("=")
    path = name.strip().split(".")
    if not found or not 2 <= len(path) <= DEEPEST or not all(path):
        raise UsageError(
            f"{option} is {text!r}; it must be section.name=value, such as training.lr=0.1"
        )
    check_section(f"{option} is {text!r}; {path[0]} is no section,", path[0])
    nested: Any = parse_value(value.strip())
    for key in reversed(path):
        nested = {key: nested}
    return dict(nested)


def check_section(complaint: str, name: str) -> None:
    if name not in SECTIONS:
        raise UsageError(f"{complaint} there are {', '.join(SECTIONS)}{hint(name, SECTIONS)}")
