"""HTML: pieces of a page. Whatever comes from a run passes through `text`."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Html(str):
    """Markup; everything else is text and gets escaped."""


def text(value: Any) -> Html:
    """A value as it is read, never as markup."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def tag(name: str, *inside: Any, **attributes: Any) -> Html:
    """One element; `class_` is written `class`, `data_axis` is written `data-axis`."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{''.join(text(one) for one in inside)}</{name}>")


def table(headings: Sequence[Any], rows: Iterable[Sequence[Any]], texts: int = 1) -> Html:
    """Scrolls sideways where it is wider than the page; the first `texts` columns hold text, the others numbers."""
    kind = ["text" if i < texts else "number" for i in range(len(headings))]
    head = tag(
        "tr",
        *(tag("th", one, class_=k, scope="col") for one, k in zip(headings, kind, strict=True)),
    )
    body = [
        tag("tr", *(tag("td", one, class_=k) for one, k in zip(row, kind, strict=True)))
        for row in rows
    ]
    top = [tag("thead", head)] if any(headings) else []
    return tag("div", tag("table", *top, tag("tbody", *body)), class_="wide")


def fold(summary: Any, *inside: Any, opened: bool = False) -> Html:
    """Something that is there for whoever wants it."""
    start = "<details open>" if opened else "<details>"
    return Html(f"{start}{tag('summary', summary)}{''.join(text(one) for one in inside)}</details>")


def embed_json(name: str, value: Any) -> Html:
    """Data for the page's script; no text in it can end the element it stands in."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return Html(f'<script type="application/json" id="{text(name)}">{plain}</script>')


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as one level: training.lr -> 0.05."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            found |= flatten(value, f"{name}.")
        else:
            listed = isinstance(value, list)
            found[name] = ", ".join(map(str, value)) if listed else str(value)
    return found
