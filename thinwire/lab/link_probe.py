"""Script: one end of a plain TCP stream, to measure what a link carries.

Usage: link_probe.py receive WARMUP_S SECONDS    prints its port, then payload bits per second
       link_probe.py send ADDRESS PORT           sends until the receiver closes

It runs as a file of its own with the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import socket
import sys
import time

CHUNK_BYTES = 1 << 20
PATIENCE_S = 20


def receive(warmup_s: float, seconds: float) -> None:
    """Count what arrives during `seconds`, after `warmup_s` in which the stream gets up to speed."""
    listener = socket.create_server(("", 0))
    listener.settimeout(PATIENCE_S)
    print(listener.getsockname()[1], flush=True)
    stream, _ = listener.accept()
    stream.settimeout(PATIENCE_S)
    buffer = bytearray(CHUNK_BYTES)
    begin = time.perf_counter()
    _receive_until(stream, buffer, begin + warmup_s)
    begin = time.perf_counter()
    received, end = _receive_until(stream, buffer, begin + seconds)
    print(received * 8 / (end - begin), flush=True)
    stream.close()


def send(address: str, port: int) -> None:
    """Send zeros until the receiver has seen enough."""
    chunk = bytes(CHUNK_BYTES)
    with socket.create_connection((address, port), timeout=PATIENCE_S) as stream:
        try:
            while True:
                stream.sendall(chunk)
        except (ConnectionResetError, BrokenPipeError):
            return


def _receive_until(stream: socket.socket, buffer: bytearray, deadline: float) -> tuple[int, float]:
    received = 0
    while (now := time.perf_counter()) < deadline:
        count = stream.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the sender closed the stream too early")
        received += count
    return received, now


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(float(sys.argv[2]), float(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
