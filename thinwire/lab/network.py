"""Namespaces, links and the bridge of one lab, through the kernel's netlink interface.

The bridge has a namespace of its own. Nothing of a lab is ever visible in the machine's own
network: no interface, no address, no route, and no firewall rule of the machine applies to it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.processes import kill_inside, namespace_inode
from thinwire.lab.records import LAB_NAME, Record
from thinwire.lab.rerouting import reroute, turn_offloads_off
from thinwire.lab.shaping import delay, shape
from thinwire.lab.topology import INTERFACE, Host, Topology
from thinwire.tools.signals import signals_held

VIRTUAL_RANKS = "`thinwire bench exchange --virtual` runs all ranks in one process without it"

MISSING = (errno.ENOENT, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a kernel says to something that it was built without."""

_BRIDGE = "br0"


def require_privileges() -> None:
    """Raise UsageError unless this process may try to create namespaces."""
    if os.geteuid() != 0:
        raise UsageError(f"thinwire lab needs root to create network namespaces; {VIRTUAL_RANKS}.")
    _pyroute2()


def create_network(topology: Topology, record: Record) -> bool:
    """Build the lab's network; on any error the caller destroys what `record` holds.

    Returns whether a relay has to be started for its latency, because the kernel lacks netem.

    1. A namespace with a bridge, the switch.
    2. For each host a namespace, a link to the switch, an address.
    3. A token bucket on both ends of the link, and on the loopback if its rate is set.
    4. The latency, if there is one.
    """
    relayed = False
    with _kernel_errors("network namespaces, bridges and veth links"):
        _create_namespace(topology.switch, record)
        with open_namespace(topology.switch) as switch:
            switch.link("add", ifname=_BRIDGE, kind="bridge")
            bridge = interface_index(switch, _BRIDGE)
            switch.link("set", index=bridge, state="up")
            for host in topology.hosts:
                _create_namespace(host.namespace, record)
                with open_namespace(host.namespace) as inside:
                    _connect(topology, host, inside, switch, bridge)
                    _shape(topology, host, inside, switch)
                    if topology.spec.latency_us:
                        relayed = _delay(topology, host, inside, switch, bridge)
    return relayed


def destroy_network(record: Record) -> None:
    """Remove the namespaces of a record, the processes inside first; absent ones are skipped.

    Raises UsageError, before touching anything, if a name now belongs to somebody else.
    """
    present = {}
    for name, expected in record.namespaces.items():
        found = namespace_inode(name)
        if found is None:
            continue
        if LAB_NAME.match(name) is None or not name.startswith(f"{record.name}-"):
            raise UsageError(f'the namespace "{name}" is not one of lab {record.name}.')
        if expected is not None and found != expected:
            raise UsageError(
                f'the namespace "{name}" was not created by lab {record.name}: remove it by hand '
                f"and then the record {record.path}."
            )
        present[name] = found
    kill_inside(present.values())
    for name in present:
        _pyroute2().netns.remove(name)


@contextmanager
def open_namespace(name: str) -> Iterator[Any]:
    """Yield a pyroute2 socket inside an existing namespace."""
    # pyroute2 forks to enter the namespace and ends that child with SIGTERM. Without flags=0 it
    # would create a namespace that does not exist.
    with signals_held():
        link = _pyroute2().NetNS(name, flags=0)
    try:
        yield link
    finally:
        link.close()


def enter_namespace(name: str) -> None:
    """Move the calling thread, and no other, into an existing namespace."""
    _pyroute2().netns.setns(name, flags=0)


def interface_index(link: Any, name: str) -> int:
    """Return the index of an interface that exists."""
    return int(link.link_lookup(ifname=name)[0])


def _create_namespace(name: str, record: Record) -> None:
    if namespace_inode(name) is not None:
        raise UsageError(f'the namespace "{name}" exists already and is not this lab\'s.')
    record.namespaces[name] = None
    record.save()
    with signals_held():
        _pyroute2().netns.create(name)
        record.namespaces[name] = namespace_inode(name)
        record.save()


def _connect(topology: Topology, host: Host, inside: Any, switch: Any, bridge: int) -> None:
    peer = {"ifname": host.name, "net_ns_fd": topology.switch}
    inside.link("add", ifname=INTERFACE, kind="veth", peer=peer)
    own = interface_index(inside, INTERFACE)
    inside.addr("add", index=own, address=host.address, prefixlen=topology.prefix_length)
    inside.link("set", index=own, state="up")
    inside.link("set", index=interface_index(inside, "lo"), state="up")
    port = interface_index(switch, host.name)
    switch.link("set", index=port, master=bridge, state="up")


def _shape(topology: Topology, host: Host, inside: Any, switch: Any) -> None:
    own = interface_index(inside, INTERFACE)
    with _kernel_errors("the token bucket queue (CONFIG_NET_SCH_TBF)"):
        if host.rate is not None:
            shape(inside, own, host.rate)
            shape(switch, interface_index(switch, host.name), host.rate)
        if topology.spec.local_bits is not None:
            loopback = interface_index(inside, "lo")
            shape(inside, loopback, topology.spec.local_bits, whole_segments=True)


def _delay(topology: Topology, host: Host, inside: Any, switch: Any, bridge: int) -> bool:
    """Delay what a host sends, by the kernel's netem; True if that is missing and a relay has to do it."""
    own = interface_index(inside, INTERFACE)
    try:
        delay(inside, own, topology.spec.latency_us, below_bucket=host.rate is not None)
        return False
    except _pyroute2().NetlinkError as error:
        if error.code not in MISSING:
            raise
    reroute(host, inside, switch, bridge)
    # A thread of its own: only the thread that enters a namespace is in it, for ever.
    with ThreadPoolExecutor(1, initializer=enter_namespace, initargs=(host.namespace,)) as one:
        one.submit(turn_offloads_off).result()
    return True


def change_rate(topology: Topology, rate: int) -> None:
    """Give the links of all hosts that have a token bucket another rate, while something runs on them."""
    with open_namespace(topology.switch) as switch:
        for host in topology.hosts:
            if host.rate is None:
                continue
            with open_namespace(host.namespace) as inside:
                shape(inside, interface_index(inside, INTERFACE), rate, again=True)
                shape(switch, interface_index(switch, host.name), rate, again=True)


@contextmanager
def _kernel_errors(feature: str) -> Iterator[None]:
    """Turn the kernel's refusals into one sentence that names what is missing."""
    netlink_error = _pyroute2().NetlinkError
    try:
        yield
    except (OSError, netlink_error) as error:
        code = getattr(error, "code", None) or getattr(error, "errno", None)
        if code in (errno.EPERM, errno.EACCES, errno.EROFS):
            raise UsageError(
                "thinwire lab needs root with the capabilities NET_ADMIN and SYS_ADMIN (a container "
                f"must be given them) to create network namespaces; {VIRTUAL_RANKS}."
            ) from error
        if code in MISSING:
            raise UsageError(f"this machine's kernel lacks {feature}.") from error
        raise


def _pyroute2() -> Any:
    try:
        import pyroute2
        import pyroute2.netns
    except ImportError as error:
        raise UsageError(
            "thinwire lab needs the package pyroute2; `pip install 'thinwire[lab]'` brings it."
        ) from error
    return pyroute2
