"""Page: sections and charts as one HTML file. Its style and script stand in it; the browser is told to load nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files

from thinwire.report.charts import Chart
from thinwire.report.html import Html, embed_json, tag
from thinwire.tools.palette import COLOURS, ON_DARK

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass
class Section:
    """A heading and what stands below it; charts come first."""

    title: str
    body: list[Html] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


@dataclass
class Page:
    title: str
    verdict: list[str]
    sections: list[Section]
    footer: str = ""


def render(page: Page) -> str:
    """The whole file."""
    charts = [chart for section in page.sections for chart in section.charts]
    numbers = itertools.count()
    sections = [render_section(section, numbers) for section in page.sections if shows(section)]
    verdict = tag("div", *(tag("p", sentence) for sentence in page.verdict), class_="verdict")
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("title", page.title),
        tag("style", Html(colour_rules() + read_part("page.css"))),
    )
    main = tag("main", tag("h1", page.title), verdict, *sections, tag("footer", page.footer))
    data = embed_json("charts", [chart.to_plain() for chart in charts])
    script = tag("script", Html(read_part("page.js")))
    return f'<!doctype html>\n<html lang="en">{head}<body>{main}{data}{script}</body></html>\n'


def shows(section: Section) -> bool:
    return bool(section.body or section.charts)


def render_section(section: Section, numbers: Iterator[int]) -> Html:
    places = [tag("div", class_="chart", data_chart=next(numbers)) for _ in section.charts]
    grid = [tag("div", *places, class_="charts")] if places else []
    return tag("section", tag("h2", section.title), *grid, *section.body)


def colour_rules() -> str:
    """The methods' colours as --c0, --c1, ... for light and dark grounds."""
    light, dark = (
        "".join(f"--c{i}:{changed.get(colour, colour)};" for i, colour in enumerate(COLOURS))
        for changed in ({}, ON_DARK)
    )
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def read_part(name: str) -> str:
    return files("thinwire.report").joinpath(name).read_text(encoding="utf-8")
