"""Notebook: tables as notebooks show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], below: Sequence[str] = ()
) -> str:
    """A table, and sentences below it."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    sentences = "".join(f"<p>{escape(text)}</p>" for text in below)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{sentences}"
