"""Script: hand frames from one interface to another, later. What a kernel without netem needs for a lab with latency.

Usage: relay.py LATENCY_US NEAR:FAR...

It runs in the namespace of the lab's switch. NEAR is the end of a host's link, FAR one end of a pair whose other end is a port of
the bridge. Frames from NEAR leave at FAR after the latency; frames from FAR leave at NEAR at once. A frame that the kernel has no room
for is lost, as on a cable. It needs only the standard library, because it must start in milliseconds.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import deque

EVERY_PROTOCOL = 0x0003
LARGEST_FRAME = 65_600
OWN_FRAME = 4
"""PACKET_OUTGOING: what this side sends is shown to it too."""
MOST_AT_ONCE = 64
"""Frames that are taken from one interface before others have their turn."""
BUFFER_BYTES = 32 * 1024 * 1024


def open_interface(name: str) -> socket.socket:
    interface = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    # At 1 gbit a process that is not let on a processor for 50 ms finds 6 MB waiting.
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        interface.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    interface.bind((name, EVERY_PROTOCOL))
    interface.setblocking(False)
    return interface


def take(interface: socket.socket) -> list[bytes]:
    """What has arrived, some of it if it is much."""
    frames = []
    for _ in range(MOST_AT_ONCE):
        try:
            frame, address = interface.recvfrom(LARGEST_FRAME)
        except OSError:
            break
        if address[2] != OWN_FRAME:
            frames.append(frame)
    return frames


def send(interface: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):
        interface.send(frame)


def relay(latency_s: float, pairs: list[tuple[str, str]]) -> None:
    """For ever: whoever started this ends it."""
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    with selectors.DefaultSelector() as ready:
        for near, far in pairs:
            one, other = open_interface(near), open_interface(far)
            ready.register(one, selectors.EVENT_READ, (other, latency_s))
            ready.register(other, selectors.EVENT_READ, (one, 0.0))
        print("ready", flush=True)
        while True:
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for key, _ in ready.select(left):
                target, delay_s = key.data
                assert isinstance(key.fileobj, socket.socket)
                for frame in take(key.fileobj):
                    if delay_s:
                        waiting.append((time.monotonic() + delay_s, target, frame))
                    else:
                        send(target, frame)
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, target, frame = waiting.popleft()
                send(target, frame)


if __name__ == "__main__":
    named = [text.partition(":") for text in sys.argv[2:]]
    relay(int(sys.argv[1]) / 1e6, [(near, far) for near, _, far in named])
