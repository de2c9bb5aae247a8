"""What `bench step` shows at its end: a table of five columns per setup, and a verdict. The files have the rest."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from thinwire.bench.host_profile import PHASES, HostProfile
from thinwire.bench.rows import Row
from thinwire.report.step_rows import (
    against_ddp,
    by_setup,
    current_rows,
    find_baseline,
    find_rate,
    judge,
    name_rate,
    name_row,
    name_setup,
    sent_mb,
    title_gain,
    warn,
)
from thinwire.tools.books import OK
from thinwire.tools.tables import TIGHT, say


def show_rows(rows: Sequence[Row], console: Console) -> None:
    """A table per setup, why rows failed, what to be careful about, and the verdict."""
    shown = current_rows(rows)
    for group in by_setup(shown):
        say(console, title_setup(group))
        console.print(setup_table(group))
    for row in shown:
        if row["status"] != OK:
            say(console, f"{name_row(row)}, {name_rate(row['rate'])}: failed: {row['note']}")
    for sentence in [*warn(shown), *judge(shown)]:
        say(console, sentence)


def setup_table(group: Sequence[Row]) -> Table:
    """One line per method and link, slowest link and fastest step first."""
    table = Table("method", "link", "ms", title_gain(group), "MB", **TIGHT)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in sorted(group, key=place_row):
        table.add_row(*cells(row, group))
    return table


def title_setup(group: Sequence[Row]) -> str:
    """What was trained, and its step without communication."""
    base = find_baseline(group)
    alone = "" if base is None else f": {base.ms:.1f} ms without communication"
    return f"{name_setup(group[0])}, batch {group[0]['batch']}{alone}"


def place_row(row: Row) -> tuple[float, float]:
    rate, endless = find_rate(row), float("inf")
    return endless if rate is None else rate, endless if row["ms"] is None else row["ms"]


def cells(row: Row, group: Sequence[Row]) -> tuple[str, ...]:
    gain, sent = against_ddp(row, group), sent_mb(row)
    return (
        name_row(row),
        name_rate(row["rate"]),
        f"{row['ms']:,.1f}" if row["status"] == OK else "failed",
        "" if gain is None else f"{gain:.2f}x",
        "" if sent is None else f"{sent:,.2f}" if sent >= 0.1 else f"{sent:.2g}",
    )


PROFILE_HEADINGS = ("phase", "thread", "us/bucket", "busy", "us/step")


def show_profile(profile: HostProfile, console: Console) -> None:
    """Where the host spent a step, per bucket where buckets were exchanged."""
    buckets = f", {profile.buckets:g} buckets" if profile.buckets else ""
    say(console, f"{profile.cell}: {profile.step_us:,.0f} us a step on worker 0's host{buckets}")
    table = Table(*PROFILE_HEADINGS, **TIGHT)
    for column in table.columns[2:]:
        column.justify = "right"
    for phase in profile.phases:
        wall, busy = (
            f"{value / profile.buckets:,.1f}" if profile.buckets else ""
            for value in (phase.wall_us, phase.busy_us)
        )
        shown = PHASES[phase.name]
        table.add_row(shown, phase.thread, wall, busy, f"{phase.wall_us:,.0f}")
    console.print(table)
