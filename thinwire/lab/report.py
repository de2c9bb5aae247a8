"""The lab's tables: traffic per host, and what the check measured."""

from __future__ import annotations

from rich.table import Table

from thinwire.lab.check import TOLERANCE, CheckReport
from thinwire.lab.counters import Traffic
from thinwire.tools.tables import format_table

TRAFFIC = {
    "host": "{host.host}",
    "sent": "{tx_bytes:,.3f}",
    "payload": "{tx_payload:,.3f}",
    "packets": "{host.link.tx_packets:,}",
    "resent": "{host.link.resent_packets:,}",
    "received": "{rx_bytes:,.3f}",
    "payload ": "{rx_payload:,.3f}",
    "inside": "{inside:,.3f}",
}
LINKS = {
    "link": "{link.link}",
    "asked": "{expected:,.1f}",
    "measured": "{measured:,.1f}",
    "payload": "{payload:,.1f}",
    "off by": "{link.error:+.1%}",
    "": "{verdict}",
}


def traffic_table(traffic: Traffic) -> Table:
    """One line per host in MB: what crossed its link, with and without packet headers."""
    rows = []
    for host in traffic.hosts:
        sizes = ("tx_bytes", "tx_payload", "rx_bytes", "rx_payload")
        megabytes = {name: getattr(host.link, name) / 1e6 for name in sizes}
        rows.append({"host": host, "inside": host.inside.tx_bytes / 1e6, **megabytes})
    title = "what crossed each host's link, in MB, and what stayed inside the host"
    return format_table(TRAFFIC, rows, title=title)


def check_table(report: CheckReport) -> Table:
    """One line per measured stream, in mbit."""
    rows = []
    for link in report.links:
        megabits = {name: getattr(link, name) / 1e6 for name in ("expected", "measured", "payload")}
        verdict = "ok" if link.ok else f"> {TOLERANCE:.0%}"
        rows.append({"link": link, "verdict": verdict, **megabits})
    ceiling = f"{report.ceiling / 1e9:.1f} gbit"
    title = f"links, in mbit (this machine's ceiling, unshaped: {ceiling})"
    return format_table(LINKS, rows, title=title)
