"""Bytes and packets that crossed the interfaces: what was sent, as a measurement.

The interface counts a large segment as one packet with one header. Payload is therefore the bytes
less one header per packet, whatever the size of the segments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.network import open_namespace
from thinwire.lab.rates import format_rate
from thinwire.lab.topology import INTERFACE, Topology

ETHERNET_HEADER = 14
IP_TCP_HEADERS = 20 + 32
"""IPv4, and TCP with the timestamps that Linux sends on every packet."""
HEADER_BYTES = ETHERNET_HEADER + IP_TCP_HEADERS


@dataclass(frozen=True)
class Counters:
    """What one interface has sent and received."""

    tx_bytes: int = 0
    tx_packets: int = 0
    rx_bytes: int = 0
    rx_packets: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.tx_bytes - earlier.tx_bytes,
            self.tx_packets - earlier.tx_packets,
            self.rx_bytes - earlier.rx_bytes,
            self.rx_packets - earlier.rx_packets,
        )

    @property
    def tx_payload(self) -> int:
        """Bytes sent without packet headers."""
        return max(0, self.tx_bytes - HEADER_BYTES * self.tx_packets)

    @property
    def rx_payload(self) -> int:
        """Bytes received without packet headers."""
        return max(0, self.rx_bytes - HEADER_BYTES * self.rx_packets)

    def as_row(self) -> dict[str, int]:
        """Return the counts and the payloads under their names."""
        return {**asdict(self), "tx_payload": self.tx_payload, "rx_payload": self.rx_payload}


@dataclass(frozen=True)
class HostTraffic:
    """The traffic of one host: over its link, and inside it over the loopback."""

    host: str
    address: str
    rate: int | None
    link: Counters
    inside: Counters

    def __sub__(self, earlier: HostTraffic) -> HostTraffic:
        return HostTraffic(
            self.host,
            self.address,
            self.rate,
            self.link - earlier.link,
            self.inside - earlier.inside,
        )

    def as_row(self) -> dict[str, Any]:
        """Return one JSON object; `inside` counts every byte once, as sent."""
        return {
            "host": self.host,
            "address": self.address,
            "rate": format_rate(self.rate),
            **self.link.as_row(),
            "inside_bytes": self.inside.tx_bytes,
            "inside_packets": self.inside.tx_packets,
            "inside_payload": self.inside.tx_payload,
        }


@dataclass(frozen=True)
class Traffic:
    """The traffic of every host of a lab, in order."""

    hosts: tuple[HostTraffic, ...]

    def __sub__(self, earlier: Traffic) -> Traffic:
        pairs = zip(self.hosts, earlier.hosts, strict=True)
        return Traffic(tuple(now - before for now, before in pairs))

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one JSON object per host."""
        return [host.as_row() for host in self.hosts]


def read_traffic(topology: Topology) -> Traffic:
    """Read the counters of every host now, from outside its namespace."""
    hosts = []
    for host in topology.hosts:
        with open_namespace(host.namespace) as link:
            counters = {
                entry.get_attr("IFLA_IFNAME"): _from_kernel(entry.get_attr("IFLA_STATS64"))
                for entry in link.get_links()
            }
        hosts.append(
            HostTraffic(host.name, host.address, host.rate, counters[INTERFACE], counters["lo"])
        )
    return Traffic(tuple(hosts))


def read_own_counters(interface: str = INTERFACE) -> Counters:
    """Read an interface of this process's own namespace; a rank calls it before and after a step.

    Needs no privileges and no package: the kernel shows each process its own namespace's table.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, separator, numbers = line.partition(":")
        if separator and name.strip() == interface:
            fields = [int(number) for number in numbers.split()]
            return Counters(fields[8], fields[9], fields[0], fields[1])
    raise UsageError(f'there is no interface "{interface}" in this network namespace.')


def write_json(path: Path, rows: Sequence[dict[str, Any]], **about: Any) -> None:
    """Write `about` and the rows under "hosts" as one JSON object."""
    path.write_text(json.dumps({**about, "hosts": list(rows)}, indent=2) + "\n")


def _from_kernel(stats: dict[str, int]) -> Counters:
    names = ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")
    return Counters(*(int(stats[name]) for name in names))
