"""Pages in a real browser: switches switch, light and dark, the width of a phone, and not a word in the console."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.browser import Browser
from thinwire.report.build import write_report

LABEL = "document.querySelector('.chart .x-label').textContent"
CURVE = "document.querySelector('.chart path.curve').getAttribute('d')"
GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture
def page(browser: Browser, compared: Path) -> Browser:
    browser.complaints.clear()
    browser.requests.clear()
    browser.look()
    browser.open("about:blank")
    browser.open((compared / "report.html").as_uri())
    return browser


def test_a_click_changes_the_axis(page: Browser) -> None:
    assert page.evaluate(LABEL) == "steps"
    drawn = page.evaluate(CURVE)
    for axis, label in (
        ("bytes", "MB sent by each worker so far"),
        ("seconds", "seconds in training steps"),
        ("steps", "steps"),
    ):
        page.click(f".chart button[data-axis={axis}]")
        page.wait(f"{LABEL} === {label!r}")
        # All charts of the page follow, and the address remembers.
        charts = "[...document.querySelectorAll('.chart')].map(c => c.dataset.axis)"
        assert set(page.evaluate(charts)) == {axis}
        assert page.evaluate("location.hash") == f"#axis={axis}"
        assert (page.evaluate(CURVE) == drawn) == (axis == "steps")
    assert page.complaints == []
    assert all(address.startswith(("file:", "about:")) for address in page.requests)


def test_the_address_chooses_the_axis(page: Browser, compared: Path) -> None:
    page.open("about:blank")
    page.open(f"{(compared / 'report.html').as_uri()}#axis=bytes")
    assert page.evaluate(LABEL) == "MB sent by each worker so far"
    page.open("about:blank")
    page.open(f"{(compared / 'report.html').as_uri()}#axis=%3Cb%3E")
    assert page.evaluate(LABEL) == "steps"
    assert page.complaints == []


def test_legend_log_and_tooltip(page: Browser) -> None:
    curves = "document.querySelectorAll('.chart path.curve').length"
    before = page.evaluate(curves)
    page.click(".legend button")
    page.wait(f"{curves} === {before - 2}")
    page.click(".legend button")
    page.wait(f"{curves} === {before}")
    drawn = page.evaluate(CURVE)
    page.click("button[data-log=y]")
    page.wait(f"{CURVE} !== {drawn!r}")
    box = "(() => { const b = document.querySelector('.chart > svg').getBoundingClientRect();"
    x, y = page.evaluate(f"{box} return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
    page.move(x, y)
    page.wait("!document.querySelector('.tip').hidden")
    assert "topk: " in page.evaluate("document.querySelector('.tip').textContent")
    assert page.complaints == []


def test_light_and_dark(page: Browser) -> None:
    line = "getComputedStyle(document.querySelector('.chart path.curve')).stroke"
    assert page.evaluate(GROUND) == "rgb(255, 255, 255)"
    light = page.evaluate(line)
    page.look(dark=True)
    page.wait(f"{GROUND} === 'rgb(18, 22, 27)'")
    # The dense line is black on white, and must not be black on black.
    assert light == "rgb(0, 0, 0)" and page.evaluate(line) == "rgb(242, 242, 242)"
    assert page.complaints == []


@pytest.mark.parametrize("run", ["compared", "timed", "planned"])
def test_it_fits_a_phone(run: str, browser: Browser, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(run)
    path = write_report(folder)
    browser.complaints.clear()
    browser.look(width=390, height=844)
    browser.open("about:blank")
    browser.open(path.as_uri())
    wide = "[...document.querySelectorAll('.chart, section, .chart svg, .verdict')]"
    assert browser.evaluate(f"{wide}.every(e => e.getBoundingClientRect().right <= innerWidth)")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Turned to the side, the charts are drawn again.
    drawn = browser.evaluate(CURVE)
    browser.look(width=844, height=390)
    browser.wait(f"{CURVE} !== {drawn!r}")
    assert browser.complaints == []
