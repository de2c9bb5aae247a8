"""What the site needs beyond its Markdown: the pages that lie outside of docs/, links that lead there, and the fields of the reference.

The pages are written for a reader of the repository, so a link is the path of a file. Here it becomes the path of a page; a link to a
file that is no page, such as a script, becomes its name. Of a class with settings the reference shows the settings and no more,
whatever they are today.
"""

from __future__ import annotations

import dataclasses
import importlib
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

OUTSIDE = {
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmark-files.md",
    "benchmarks/LOG.md": "log.md",
}
"""Pages by where they lie in the repository, and by where they stand in the site."""
ELSEWHERE = {"README.md": "index.md"}
"""What the site says on another page."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ENTRY = re.compile(r"^::: (\S+)\n    options:\n(?:      .*\n?)+", re.M)


def on_files(files: Any, config: Any) -> Any:
    root = Path(config.config_file_path).parent
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    lies_at = {page: path for path, page in OUTSIDE.items()}
    source = lies_at.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewrite(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        lies = posixpath.normpath(str(PurePosixPath(source).parent / path))
        found = OUTSIDE.get(lies) or ELSEWHERE.get(lies)
        if found is None and lies.startswith("docs/"):
            found = lies.removeprefix("docs/")
        if found is None:
            return text if text.startswith("`") else f"`{text}`"
        return f"{image}[{text}]({found}{'#' + anchor if anchor else ''})"

    return ENTRY.sub(with_fields, LINK.sub(rewrite, markdown))


def with_fields(entry: re.Match[str]) -> str:
    """An entry of the reference with the fields that its class has, unless it says itself what is shown."""
    module, _, name = entry[1].rpartition(".")
    if "members:" in entry[0] or module.startswith("thinwire.integrations"):
        return entry[0]
    found = getattr(importlib.import_module(module), name)
    if not dataclasses.is_dataclass(found):
        return entry[0]
    fields = [field.name for field in dataclasses.fields(found) if not field.name.startswith("_")]
    shown = f"[{', '.join(fields)}]" if fields else "false"
    return f"{entry[0].rstrip()}\n      inherited_members: true\n      members: {shown}\n"
