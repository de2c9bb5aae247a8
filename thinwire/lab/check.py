"""Measure a lab's links through plain sockets, and this machine's ceiling without shaping."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.lab.counters import ETHERNET_HEADER, IP_TCP_HEADERS, LINK_MTU
from thinwire.lab.lab import Lab
from thinwire.lab.processes import start_in_namespace
from thinwire.lab.rates import format_rate
from thinwire.lab.records import hosts_file
from thinwire.lab.topology import Host, LabSpec, Topology
from thinwire.tools.processes import stop_processes

TOLERANCE = 0.05
SECONDS = 0.8
WARMUP_S = 0.3
LOOPBACK_MTU = 65536
TOGETHER = ", all at once"

_PROBE = Path(__file__).with_name("link_probe.py")
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Measurement:
    """One stream: what its link should carry and what it did, in bits per second."""

    link: str
    expected: int
    payload: float
    """What the program at the other end received."""
    measured: float
    """The same with packet headers, which a link's rate includes."""

    @property
    def error(self) -> float:
        """How far off the measured rate is, as a fraction of the expected one."""
        return self.measured / self.expected - 1

    @property
    def ok(self) -> bool:
        """Whether the rate holds within 5 %."""
        return abs(self.error) <= TOLERANCE


@dataclass(frozen=True)
class CheckReport:
    """What `thinwire lab --check` found."""

    ceiling: float
    """Bits per second, headers included, of one stream between two unshaped hosts."""
    links: tuple[Measurement, ...]

    @property
    def ok(self) -> bool:
        """Whether every link holds its rate."""
        return all(link.ok for link in self.links)

    @property
    def advice(self) -> str:
        """What to do about it in one sentence; empty if every link holds its rate."""
        off = [link for link in self.links if not link.ok]
        if not off:
            return ""
        if all(link.link.endswith(TOGETHER) for link in off):
            return (
                "each link holds its rate alone, but not all at once: this machine's processors are "
                "the limit; lower the rate or the number of hosts."
            )
        return f"{len(off)} of {len(self.links)} measurements are more than {TOLERANCE:.0%} off."


def check(spec: LabSpec) -> CheckReport:
    """Measure every shaped link of the lab that `spec` describes.

    1. Measure the ceiling: one stream between two unshaped hosts.
    2. Refuse rates above it (UsageError): the processor would be the link.
    3. Each link alone, both ways, against one more host that is unshaped.
    4. All links together, each host sending to the next, as a ring collective does.
    """
    ceiling = measure_ceiling()
    refuse_above(spec, ceiling)
    rates = [f"host{index + 1}={format_rate(rate)}" for index, rate in enumerate(spec.rates)]
    bench = replace(spec, hosts=spec.hosts + 1, rate=rates, ranks_per_host=1, mps=False)
    with Lab(bench) as lab:
        *hosts, partner = lab.topology.hosts
        links = [
            measurement
            for host in hosts
            for measurement in _check_alone(lab.topology, host, partner)
        ]
        links += _check_together(lab.topology, hosts)
    return CheckReport(ceiling, tuple(links))


def measure_ceiling() -> float:
    """Return bits per second between two unshaped hosts, the better of two tries."""
    with Lab(LabSpec(hosts=2)) as lab:
        first, second = lab.topology.hosts
        tries = [measure_streams(lab.topology, [(first, second)])[0] for _ in range(2)]
    return _with_headers(max(tries), LINK_MTU)


def measure_streams(topology: Topology, pairs: Sequence[tuple[Host, Host]]) -> list[float]:
    """Run one stream per (sender, receiver) at the same time; return payload bits per second."""
    names = hosts_file(topology.name)
    # A stream needs some round trips to get up to speed.
    warmup = WARMUP_S + 40e-6 * topology.spec.latency_us
    probe = [sys.executable, "-I", "-S", str(_PROBE)]
    with ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        receivers = []
        for _, target in pairs:
            command = [*probe, "receive", str(warmup), str(SECONDS)]
            receivers.append(start_in_namespace(target.namespace, names, command, os.environ))
            started.append(receivers[-1])
        for (source, target), receiver in zip(pairs, receivers, strict=True):
            assert receiver.stdout is not None
            port = receiver.stdout.readline().decode().strip()
            command = [*probe, "send", target.address, port]
            started.append(start_in_namespace(source.namespace, names, command, os.environ))
        return [_read_rate(receiver) for receiver in receivers]


def _check_alone(topology: Topology, host: Host, partner: Host) -> list[Measurement]:
    found = []
    if host.rate is not None:
        sends = _Stream(f"{host.name} sends", host, partner, host.rate, LINK_MTU)
        receives = _Stream(f"{host.name} receives", partner, host, host.rate, LINK_MTU)
        found += _measure(topology, [sends]) + _measure(topology, [receives])
    local = topology.spec.local_bits
    if local is not None:
        inside = _Stream(f"{host.name} inside", host, host, local, LOOPBACK_MTU)
        found += _measure(topology, [inside])
    return found


def _check_together(topology: Topology, hosts: Sequence[Host]) -> list[Measurement]:
    ring = []
    for source, target in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
        if source is target or source.rate is None or target.rate is None:
            return []
        link = f"{source.name} to {target.name}{TOGETHER}"
        ring.append(_Stream(link, source, target, min(source.rate, target.rate), LINK_MTU))
    return _measure(topology, ring)


@dataclass(frozen=True)
class _Stream:
    link: str
    source: Host
    target: Host
    expected: int
    mtu: int


def _measure(topology: Topology, streams: Sequence[_Stream]) -> list[Measurement]:
    """Measure streams that run at once; a second time if one is off, the machine may be busy."""
    for _ in range(2):
        pairs = [(stream.source, stream.target) for stream in streams]
        found = [
            Measurement(stream.link, stream.expected, payload, _with_headers(payload, stream.mtu))
            for stream, payload in zip(streams, measure_streams(topology, pairs), strict=True)
        ]
        if all(measurement.ok for measurement in found):
            break
    return found


def refuse_above(spec: LabSpec, ceiling: float) -> None:
    """UsageError if a rate is above the ceiling, in bits per second."""
    named = [(f"rate of host{index + 1}", rate) for index, rate in enumerate(spec.rates)]
    for field, rate in [*named, ("local_rate", spec.local_bits)]:
        if rate is not None and rate > ceiling:
            raise UsageError(
                f"{field} is {format_rate(rate)}, but this machine's ceiling is "
                f"{ceiling / 1e9:.1f}gbit: one unshaped stream between two hosts carries no more."
            )


def _with_headers(payload: float, mtu: int) -> float:
    return payload * (mtu + ETHERNET_HEADER) / (mtu - IP_TCP_HEADERS)


def _read_rate(receiver: subprocess.Popen[bytes]) -> float:
    output, errors = receiver.communicate(timeout=_TIMEOUT_S)
    if receiver.returncode != 0:
        raise RuntimeError(f"a link could not be measured: {errors.decode().strip()}")
    return float(output)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    stop_processes(started, grace_s=1.0)
    for process in started:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
