"""One rank of a talk between two hosts: rank 1 prints the shortest round trip in seconds, and how many bytes came back."""

from __future__ import annotations

import json
import os
import socket
import time

ROUNDS = 3
MOVED = 500_000


def listen(address: tuple[str, int]) -> None:
    with socket.create_server(address) as server:
        other, _ = server.accept()
        with other:
            for _ in range(ROUNDS):
                other.sendall(other.recv(1))
            received = 0
            while received < MOVED:
                received += len(other.recv(1 << 16))
            other.sendall(received.to_bytes(8, "big"))
            other.recv(1)


def talk(address: tuple[str, int]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            other = socket.create_connection(address, timeout=20)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        other.sendall(b"x")
        other.recv(1)
        times.append(time.perf_counter() - began)
    other.sendall(b"y" * MOVED)
    moved = int.from_bytes(other.recv(8), "big")
    other.sendall(b"x")
    print(json.dumps([min(times), moved]))


if __name__ == "__main__":
    place = (os.environ["MASTER_ADDR"], 5555)
    listen(place) if os.environ["RANK"] == "0" else talk(place)
