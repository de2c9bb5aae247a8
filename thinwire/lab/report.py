"""The lab's tables: traffic per host, and what the check measured."""

from __future__ import annotations

from rich.table import Table

from thinwire.lab.check import TOLERANCE, CheckReport
from thinwire.lab.counters import Traffic


def traffic_table(traffic: Traffic) -> Table:
    """Return one line per host in MB: what crossed its link, with and without packet headers."""
    table = Table(title="what crossed each host's link, in MB, and what stayed inside the host")
    table.add_column("host")
    sending = ("sent", "payload", "packets", "resent")
    for column in (*sending, "received", "payload", "inside"):
        table.add_column(column, justify="right")
    for host in traffic.hosts:
        link = host.link
        table.add_row(
            host.host,
            _megabytes(link.tx_bytes),
            _megabytes(link.tx_payload),
            f"{link.tx_packets:,}",
            f"{link.resent_packets:,}",
            _megabytes(link.rx_bytes),
            _megabytes(link.rx_payload),
            _megabytes(host.inside.tx_bytes),
        )
    return table


def check_table(report: CheckReport) -> Table:
    """Return one line per measured stream, in mbit."""
    ceiling = f"{report.ceiling / 1e9:.1f} gbit"
    table = Table(title=f"links, in mbit (this machine's ceiling, unshaped: {ceiling})")
    table.add_column("link")
    for column in ("asked", "measured", "payload", "off by"):
        table.add_column(column, justify="right")
    table.add_column("")
    for link in report.links:
        numbers = [f"{value / 1e6:,.1f}" for value in (link.expected, link.measured, link.payload)]
        verdict = "ok" if link.ok else f"> {TOLERANCE:.0%}"
        table.add_row(link.link, *numbers, f"{link.error:+.1%}", verdict)
    return table


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3f}"
