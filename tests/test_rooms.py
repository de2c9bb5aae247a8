"""Tools are guests of the library: it never imports them, and they use its public names."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "thinwire"
MAY_IMPORT = {
    "tools": set(),
    "lab": {"tools"},
    "report": {"tools", "lab.rates"},
    "recipes": {"tools", "lab", "report"},
    "bench": {"tools", "lab", "report", "recipes.kinds", "recipes.models", "recipes.objectives"},
    "analyse": {"tools", "recipes"},
    "cli": set(),
    "__main__": {"cli"},
}
"""Every guest, and the other guests that it may know."""

PUBLIC_MODULES = {"errors", "files", "validate", "version"}
"""Modules that are public as they are; of packages, only the names in `__all__` are."""


def imports_of(path: Path, *, at_run_time: bool = False) -> Iterator[tuple[str, str]]:
    """(module inside thinwire, name) of everything a file imports from the package; for types too, unless `at_run_time`."""
    tree = ast.parse(path.read_text())
    checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and is_type_check(n)]
    skipped = {inner for one in checked for inner in ast.walk(one)} if at_run_time else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if (node.module or "").split(".")[0] == "thinwire":
                for alias in node.names:
                    yield (node.module or "").partition(".")[2], alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("thinwire."):
                    yield alias.name.partition(".")[2], ""


def is_type_check(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_guest(module: str) -> bool:
    return module.split(".")[0] in MAY_IMPORT


FILES = sorted(PACKAGE.rglob("*.py"))
GUESTS = [path for path in FILES if room_of(path) in MAY_IMPORT]


def test_the_library_never_imports_a_guest() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} imports {module or name}"
        for path in FILES
        if path not in GUESTS
        for module, name in imports_of(path)
        if is_guest(module or name)
    }
    assert found == set()


def test_guests_know_only_the_guests_they_build_on() -> None:
    found = set()
    for path in GUESTS:
        room = room_of(path)
        allowed = {room, *MAY_IMPORT[room]}
        for module, name in imports_of(path):
            if is_guest(module or name):
                known = any(f"{module}.".startswith(f"{one}.") for one in allowed)
                found |= set() if known else {f"{path.relative_to(PACKAGE)} imports {module}"}
    assert found == set()


def test_guests_use_public_names() -> None:
    found: dict[str, set[str]] = {}
    for path in GUESTS:
        for module, name in imports_of(path):
            if not is_guest(module or name) and not is_public(module, name):
                found.setdefault(module, set()).add(name)
    assert found == {}


def is_public(module: str, name: str) -> bool:
    if module in PUBLIC_MODULES:
        return True
    if not (PACKAGE / module.replace(".", "/") / "__init__.py").exists():
        return False
    return name in getattr(importlib.import_module(f"thinwire.{module}".strip(".")), "__all__", ())


ORDER = [
    *("errors", "version", "validate", "described", "forms", "files"),
    *(
        "layout",
        "wire",
        "kernels",
        "select",
        "memory",
        "exchange",
        "observe",
        "compress",
        "lowrank",
    ),
    *(
        "methods",
        "plan",
        "optim",
        "engine",
        "auto",
        "handle",
        "elastic",
        "adapters",
        "horovod",
        "integrations",
        "public",
        "__init__",
    ),
]
"""The rooms of the library; each knows only those before it."""


def test_rooms_know_only_the_rooms_before_them() -> None:
    found = set()
    for path in FILES:
        if path in GUESTS:
            continue
        room = room_of(path)
        for module, name in imports_of(path, at_run_time=True):
            other = (module or name).split(".")[0]
            # Horovod's face, as its users' scripts, knows the whole package.
            known = ORDER.index(other) <= ORDER.index(room) if other in ORDER else True
            if not known:
                found.add(f"{path.relative_to(PACKAGE)} imports {other}")
    assert found == set()


def lines_of(node: ast.FunctionDef) -> int:
    """Without the docstring."""
    text = ast.get_docstring(node, clean=False)
    return (node.end_lineno or 0) - node.lineno + 1 - (len(text.splitlines()) if text else 0)


def test_no_function_is_long() -> None:
    found = {
        f"{node.name} in {path.relative_to(PACKAGE)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and lines_of(node) > 60
    }
    assert found == set()
