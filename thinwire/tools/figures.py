"""Figures: empty pictures to draw into, and what all pictures have in common. matplotlib is imported when one is made."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from thinwire.errors import UsageError

MOST_DECADES = 3
"""With more on an axis, numbers between them would touch each other."""


def make_figure(width: float, height: float, dpi: int = 120) -> Any:
    """A figure without pyplot: no display, no global state."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError(
            "plots need the package 'matplotlib', which is not installed; the rows are complete without them"
        ) from None
    # Its cache may remember fonts of an environment that is gone; it finds others, at a warning per glyph.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def tidy(axes: Any) -> None:
    """A faint grid, no frame on the sides without numbers, and numbers as people write them."""
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            label_decades(axis)


def label_decades(axis: Any) -> None:
    """1, 2 and 5 of every decade, written out, or each decade where there are many; other marks have no number."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    wide = low > 0 and math.log10(high / low) > MOST_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(lambda value, _: short_number(value))
    axis.set_minor_formatter(NullFormatter())


def short_number(value: float) -> str:
    """0.5, 200, 20 k, 3 M: as short as a mark on an axis has room for."""
    for least, unit, name in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if value >= least:
            return f"{value / unit:g}{name}"
    return f"{value:.10g}"


def add_legend(figure: Any, panels: Sequence[Any], *, below: bool = False) -> None:
    """One legend for all panels, beside or below them: never on a line. A name comes once."""
    named: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if not named:
        return
    place: dict[str, Any] = {"loc": "outside right upper"}
    if below:
        widest = max(map(len, named))
        columns = max(1, min(len(named), int(figure.get_figwidth() * 11 / (widest + 6))))
        place = {"loc": "outside lower center", "ncols": columns}
    figure.legend(named.values(), named.keys(), frameon=False, fontsize="small", **place)
