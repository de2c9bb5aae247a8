"""The documentation as a site: every page in the menu, every link and anchor there, every public name in the reference.

`make docs` builds it with MkDocs, which checks the links once more; here nothing but the files is needed.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import thinwire
from tests.pages import PAGES, ROOT

yaml = pytest.importorskip("yaml", reason="the menu is YAML, and there is nothing to read it with")

LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+?)\s*$", re.M)
READABLE = sorted({*PAGES, ROOT / "examples" / "README.md", ROOT / "benchmarks" / "LOG.md"})
REFERENCE = sorted((ROOT / "docs").glob("api*.md"))
MODULES = {"elastic", "exchange", "memory", "optim", "select", "wire"}
"""Public names that hold parts, which the reference names one by one."""


class Names(yaml.SafeLoader):  # type: ignore[misc]
    """Reads mkdocs.yml."""


def settings() -> dict[str, Any]:
    return dict(yaml.load((ROOT / "mkdocs.yml").read_text(), Names))


def pages_of(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for entry in menu.values() if isinstance(menu, dict) else menu:
            yield from pages_of(entry)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """As GitHub and MkDocs both make them of headings without special signs."""
    titles = HEADING.findall(without_code(page.read_text()))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


def test_every_page_is_in_the_menu() -> None:
    outside = runpy_outside()
    listed = list(pages_of(settings()["nav"]))
    there = {path.name for path in (ROOT / "docs").glob("*.md")} | set(outside.values())
    assert len(listed) == len(set(listed)), "a page is in the menu twice"
    assert set(listed) == there, "add the page to `nav` in mkdocs.yml, or take it out"
    assert [path for path in outside if not (ROOT / path).is_file()] == []


def runpy_outside() -> dict[str, str]:
    """What docs/theme/site.py adds, read without MkDocs."""
    text = (ROOT / "docs" / "theme" / "site.py").read_text()
    (block,) = re.findall(r"^OUTSIDE = (\{.*?^\})", text, re.S | re.M)
    return dict(yaml.safe_load(block))


@pytest.mark.parametrize("page", READABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def references() -> Iterator[tuple[str, str, list[str] | None]]:
    """(path of the object, what it is called, the members that are shown) of every entry."""
    for page in REFERENCE:
        for path, options in re.findall(r"^::: (\S+)\n((?:    .*\n?)+)", page.read_text(), re.M):
            said = yaml.safe_load(options)["options"]
            yield path, said["heading"], said.get("members")


def find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_reference_has_every_public_name() -> None:
    named = {name.removeprefix("tw.") for _, name, _ in references()}
    public = set(thinwire.__all__) - MODULES - {"__version__"}
    assert public - named == set(), "add the name to its group in docs/api*.md"


def test_what_the_reference_names_is_what_is_shown() -> None:
    for path, name, members in references():
        if path.startswith("thinwire.integrations.") and "." in path.removeprefix(
            "thinwire.integrations."
        ):
            # Frameworks may be missing.
            continue
        found = find(path)
        if name.startswith("tw."):
            public: Any = thinwire
            for part in name.split(".")[1:]:
                public = getattr(public, part)
            assert found is public, f"{path} is not {name}"
        assert [m for m in members or () if not has_member(found, m)] == [], path


def has_member(found: Any, name: str) -> bool:
    return hasattr(found, name) or name in getattr(found, "__dataclass_fields__", {})


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="MkDocs Material is not installed: make docs does it")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: make docs does it")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stderr
    for page in ("index.html", "api.html", "log.html"):
        text = (tmp_path / page).read_text()
        assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', text) == []
    assert "Compress the gradients of a DistributedDataParallel" in (
        (tmp_path / "api.html").read_text()
    )
