"""Latency without netem: every host's link ends at a relay (`relay.py`), which hands its frames on to the bridge later.

Frames must be whole when a program sees them, so the hosts' interfaces neither leave checksums to the hardware nor send
segments that somebody else would have to cut. In exchange packets may be larger, so that there are fewer of them to hand on.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.processes import command_inside
from thinwire.lab.topology import INTERFACE, Host, Topology
from thinwire.tools.processes import start_process

RELAYED_MTU = 16_000
"""Below the smallest token bucket, which would drop a larger packet."""
BY_RELAY = "packets are delayed by a program, for the kernel lacks netem"
_RELAY = Path(__file__).with_name("relay.py")
_ETHTOOL_REQUEST = 0x8946
_OFFLOADS = {
    "checksums": 0x17,
    "scattered sending": 0x19,
    "TCP segmentation": 0x1F,
    "other segmentation": 0x24,
}
"""What ethtool calls them, and the command that turns each on or off."""


def reroute(host: Host, inside: Any, switch: Any, bridge: int) -> None:
    """Put a pair of interfaces between the end of a host's link and the bridge; the relay joins what is cut."""
    near, far = relayed_pair(host)
    inside.link("set", index=_index(inside, INTERFACE), mtu=RELAYED_MTU)
    switch.link("set", index=_index(switch, near), master=0, mtu=RELAYED_MTU)
    switch.link("add", ifname=far, kind="veth", peer={"ifname": f"{host.name}p"})
    for name, settings in ((far, {}), (f"{host.name}p", {"master": bridge})):
        switch.link("set", index=_index(switch, name), mtu=RELAYED_MTU, state="up", **settings)


def relayed_pair(host: Host) -> tuple[str, str]:
    """(the end of the host's link, what leads to the bridge), both in the switch's namespace."""
    return host.name, f"{host.name}r"


def turn_offloads_off() -> None:
    """Of the host whose namespace the calling thread is in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", INTERFACE.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, _ETHTOOL_REQUEST, request.ljust(40, b"\0"))


def start_relay(topology: Topology, hosts: Path) -> subprocess.Popen[bytes]:
    """It ends with this process, and with the lab's namespaces."""
    pairs = [":".join(relayed_pair(host)) for host in topology.hosts]
    script = [sys.executable, "-I", "-S", str(_RELAY), str(topology.spec.latency_us), *pairs]
    command = command_inside(topology.switch, hosts, script)
    environment: Mapping[str, str] = os.environ
    process = start_process(command, environment, subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        raise UsageError(
            f"latency is {topology.spec.latency}; this kernel has neither netem nor packet sockets, one of which it needs."
        )
    return process


def _index(link: Any, name: str) -> int:
    return int(link.link_lookup(ifname=name)[0])
