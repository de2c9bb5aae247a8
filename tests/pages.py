"""Pages: the commands that the documentation shows, in its code blocks and between backquotes."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SHELL = ("", "sh", "bash", "shell", "console")
"""Languages of fenced blocks that hold commands; an indented block has none."""
OTHER = ("python", "toml", "yaml", "json", "text")
PREFIX = re.compile(r"sudo|[A-Z_]+=\S*")
"""What may stand before the program."""


@dataclass(frozen=True)
class Command:
    """A line that a reader would type."""

    page: str
    text: str
    inline: bool = False
    """In a sentence or a table, where a command may also just be named."""

    @property
    def words(self) -> list[str]:
        """Without its comment, what stands before the program and where its output goes."""
        words = shlex.split(self.text, comments=True)
        while words and PREFIX.fullmatch(words[0]):
            words.pop(0)
        return words[: words.index(">")] if ">" in words else words


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def read_page(page: Path, programs: tuple[str, ...]) -> Iterator[Command]:
    return read_commands(str(page.relative_to(ROOT)), page.read_text(), programs)


def read_commands(name: str, text: str, programs: tuple[str, ...]) -> Iterator[Command]:
    """Every line of every block of commands; in sentences what begins with one of `programs`."""
    blocks, prose = split_page(text)
    for block in blocks:
        if block.language not in (*SHELL, *OTHER):
            raise AssertionError(
                f"{name} has a block of {block.language!r}; write one of {OTHER} or nothing"
            )
        if block.language in SHELL and not is_python(block.text):
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    yield Command(name, " ".join(line.split()) if "'" not in line else line.strip())
    for paragraph in re.split(r"\n\s*\n", prose):
        for span in re.findall(r"`([^`]+)`", paragraph):
            command = Command(name, " ".join(span.split()), inline=True)
            if re.match(rf"(?:(?:{PREFIX.pattern}) )*(?:{'|'.join(programs)}) ", command.text):
                yield command


def split_page(text: str) -> tuple[list[Block], str]:
    """(code blocks, everything else); an indented block begins after an empty line, as Markdown has it."""
    blocks: list[Block] = []
    prose: list[str] = []
    code: list[str] | None = None
    language = fence = ""
    previous = ""
    for line in [*text.splitlines(), ""]:
        opening = re.match(r"\s*(```+)(\w*)", line)
        if fence:
            if opening and line.strip() == fence:
                blocks.append(Block(language, "\n".join(code or [])))
                fence, code = "", None
            else:
                code = [*(code or []), line]
        elif code is not None and (line.startswith("    ") or not line.strip()):
            code.append(line)
        else:
            if code is not None:
                blocks.append(Block("", dedent("\n".join(code))))
                code = None
            if opening:
                fence, language = opening[1], opening[2]
            elif line.startswith("    ") and not previous.strip():
                code = [line]
            else:
                prose.append(line)
        previous = line
    if code is not None:
        blocks.append(Block("", dedent("\n".join(code))))
    return blocks, "\n".join(prose)


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
