"""What a lab is made of: the user's LabSpec and the named, addressed hosts planned from it."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from thinwire.errors import UsageError
from thinwire.lab.rates import UNSHAPED, parse_host_rates, parse_latency, parse_rate

MAXIMUM_HOSTS = 250
"""One /24 holds the addresses of one lab."""

INTERFACE = "eth0"
"""The name of every host's link; each host has its own namespace, so the name can be the same."""

# The private range 10.64.0.0/10, cut into networks of one lab each.
_FIRST_NETWORK = ipaddress.IPv4Address("10.64.0.0")
_PREFIX_LENGTH = 24
_NETWORK_COUNT = 2 ** (24 - 10)


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """A validated description of an emulated cluster; texts are written as on the command line."""

    hosts: int = 2
    """Number of hosts, named host1, host2, ..."""
    rate: Annotated[str | Sequence[str], "RATE"] = UNSHAPED
    """Rate of each host's link, each way: 10gbit, or host2=1gbit for one; may be given several times."""
    ranks_per_host: int = 1
    """Processes per host; they share the host's address and link."""
    local_rate: Annotated[str, "RATE"] = UNSHAPED
    """Rate of all TCP traffic inside one host together."""
    latency: Annotated[str, "TIME"] = "0ms"
    """Delay added one way to every packet that leaves a host, such as 500us; by the kernel's netem, or by a relay where it is missing."""
    share_gpu: bool = False
    """Give every rank its own NCCL_HOSTID, so that ranks of one host may share a GPU."""
    mps: bool = False
    """Start NVIDIA's multi-process service for the lifetime of the lab."""

    def __post_init__(self) -> None:
        _check_count("hosts", self.hosts, MAXIMUM_HOSTS)
        _check_count("ranks_per_host", self.ranks_per_host, 64)
        _ = self.rates, self.local_bits, self.latency_us

    @property
    def rates(self) -> tuple[int | None, ...]:
        """Bits per second of each host's link, None where it is unshaped."""
        settings = [self.rate] if isinstance(self.rate, str) else self.rate
        return parse_host_rates(settings, self.hosts)

    @property
    def local_bits(self) -> int | None:
        """Bits per second inside one host, None where it is unshaped."""
        return parse_rate(self.local_rate, "local_rate")

    @property
    def latency_us(self) -> int:
        """Microseconds of added delay, one way."""
        return parse_latency(self.latency)

    @property
    def world_size(self) -> int:
        """Number of ranks in the lab."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Host:
    """One emulated machine: a network namespace with one address and one shaped link."""

    index: int
    name: str
    namespace: str
    address: str
    rate: int | None


@dataclass(frozen=True)
class Rank:
    """One process of the run and where it lives."""

    rank: int
    local_rank: int
    host: Host


@dataclass(frozen=True)
class Topology:
    """Names and addresses of one lab; every name starts with the lab's own."""

    name: str
    network: str
    hosts: tuple[Host, ...]
    spec: LabSpec

    @property
    def switch(self) -> str:
        """Namespace of the bridge that joins the hosts."""
        return f"{self.name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Every namespace the lab creates."""
        return (self.switch, *(host.namespace for host in self.hosts))

    @property
    def prefix_length(self) -> int:
        """Length of the network prefix that all hosts share."""
        return _PREFIX_LENGTH

    def ranks(self) -> list[Rank]:
        """Return the ranks host by host, as torchrun numbers them."""
        per_host = self.spec.ranks_per_host
        return [
            Rank(host.index * per_host + local, local, host)
            for host in self.hosts
            for local in range(per_host)
        ]


def plan_topology(
    spec: LabSpec, taken_names: Collection[str] = (), taken_networks: Collection[str] = ()
) -> Topology:
    """Choose a name and a private /24 that no other lab on this machine uses, and lay out hosts.

    1. Draw a random name until it is free.
    2. Start from the network that the name points at and walk to the first free one.
    """
    name = _draw_name()
    while name in taken_names:
        name = _draw_name()
    base = _free_network(int(name[2:], 16), taken_networks)
    network = f"{base}/{_PREFIX_LENGTH}"
    hosts = tuple(
        Host(index, f"host{index + 1}", f"{name}-host{index + 1}", str(base + index + 1), rate)
        for index, rate in enumerate(spec.rates)
    )
    return Topology(name, network, hosts, spec)


def _free_network(start: int, taken: Collection[str]) -> ipaddress.IPv4Address:
    for step in range(_NETWORK_COUNT):
        offset = (start + step) % _NETWORK_COUNT * 2 ** (32 - _PREFIX_LENGTH)
        base = _FIRST_NETWORK + offset
        if f"{base}/{_PREFIX_LENGTH}" not in taken:
            return base
    raise UsageError(
        f"all {_NETWORK_COUNT} private networks are taken by other labs; run `thinwire lab --clean`."
    )


def _draw_name() -> str:
    return f"tw{secrets.token_hex(4)}"


def _check_count(field: str, value: int, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise UsageError(f"{field} is {value}, but it must be a whole number from 1 to {maximum}.")
