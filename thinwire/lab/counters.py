"""Bytes and packets that crossed the interfaces: what was sent, as a measurement.

The interface counts a large segment as one packet with one header. Payload is therefore the bytes
less one header per packet, whatever the size of the segments. What TCP sends again crosses the
interface again: two processors that share a link's work reorder packets now and then, and the
sender takes that for a loss. The kernel counts these packets per namespace, and the payload sent is
without them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.network import enter_namespace, open_namespace
from thinwire.lab.rates import format_rate
from thinwire.lab.topology import INTERFACE, Topology
from thinwire.tools.files import write_text

ETHERNET_HEADER = 14
IP_TCP_HEADERS = 20 + 32
"""IPv4, and TCP with the timestamps that Linux sends on every packet."""
HEADER_BYTES = ETHERNET_HEADER + IP_TCP_HEADERS
LINK_MTU = 1500
PACKET_PAYLOAD = LINK_MTU - IP_TCP_HEADERS


@dataclass(frozen=True)
class Counters:
    """What one interface has sent and received, and how many packets TCP sent a second time."""

    tx_bytes: int = 0
    tx_packets: int = 0
    rx_bytes: int = 0
    rx_packets: int = 0
    resent_packets: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*(now - before for now, before in pairs))

    @property
    def tx_payload(self) -> int:
        """Bytes sent without packet headers and without what was sent again."""
        resent = PACKET_PAYLOAD * self.resent_packets
        return max(0, self.tx_bytes - HEADER_BYTES * self.tx_packets - resent)

    @property
    def rx_payload(self) -> int:
        """Bytes received without packet headers, what came twice included."""
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
        link, inside = self.link - earlier.link, self.inside - earlier.inside
        return replace(self, link=link, inside=inside)

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
            stats = {
                entry.get_attr("IFLA_IFNAME"): entry.get_attr("IFLA_STATS64")
                for entry in link.get_links()
            }
        # A thread of its own: only the thread that enters a namespace is in it, for ever.
        with ThreadPoolExecutor(1, initializer=enter_namespace, initargs=(host.namespace,)) as one:
            resent = one.submit(_resent_packets).result()
        crossed, inside = _from_kernel(stats[INTERFACE], resent), _from_kernel(stats["lo"], 0)
        hosts.append(HostTraffic(host.name, host.address, host.rate, crossed, inside))
    return Traffic(tuple(hosts))


def read_own_counters(interface: str = INTERFACE) -> Counters:
    """Read an interface of this process's own namespace; a rank calls it before and after a step.

    Needs no privileges and no package: the kernel shows each process its own namespace's table.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, separator, numbers = line.partition(":")
        if separator and name.strip() == interface:
            fields = [int(number) for number in numbers.split()]
            return Counters(fields[8], fields[9], fields[0], fields[1], _resent_packets())
    raise UsageError(f'there is no interface "{interface}" in this network namespace.')


def write_json(path: Path, rows: Sequence[dict[str, Any]], **about: Any) -> None:
    """Write `about` and the rows under "hosts" as one JSON object."""
    write_text(path, json.dumps({**about, "hosts": list(rows)}, indent=2) + "\n")


def _from_kernel(stats: dict[str, int], resent_packets: int) -> Counters:
    names = ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")
    counts = {name: int(stats[name]) for name in names}
    return Counters(**counts, resent_packets=resent_packets)


def _resent_packets() -> int:
    """TCP's count of repeated packets in the namespace of the calling thread."""
    lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
    names, numbers = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(numbers[names.index("RetransSegs")])
