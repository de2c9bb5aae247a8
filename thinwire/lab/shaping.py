"""Token buckets: how large, and how they are put on a link.

What was found by measuring (`thinwire lab --check`):

- The kernel charges a large segment (GSO) for the headers of every packet it stands for, so a
  link of MTU 1500 carries 1448 bytes of payload per 1514 bytes of rate, as a cable does.
- A segment larger than the bucket is not lost but split by the kernel, at the price of processor
  time. A bucket of 96 KiB takes the largest segment (64 KiB and its headers) whole. The loopback
  has real packets of 64 KiB, which cannot be split: a smaller bucket would drop every one.
- The bucket must bridge the time until the timer wakes the queue. At 10 gbit a bucket of 96 KiB
  (79 us) lost 6 % of the rate, one of 256 KiB (0.2 ms) less than 1 %.
- Whatever the bucket holds passes at once after a pause, so it is kept as small as the above
  allows: 2.6 ms of the rate at 100 mbit, 0.8 ms at 1 gbit, 0.2 ms at 10 gbit.
"""

from __future__ import annotations

from typing import Any

WHOLE_SEGMENT_BYTES = 96 * 1024
SMALLEST_BURST_BYTES = 32 * 1024
TIMER_SLACK_S = 210e-6
SMALLEST_QUEUE_BYTES = 4 * 1024 * 1024
QUEUE_S = 10e-3
NETEM_QUEUE_PACKETS = 1_000_000


def choose_burst(rate: int, whole_segments: bool = False) -> int:
    """Return the bucket size in bytes for a rate in bits per second.

    `whole_segments` is for interfaces whose single packets are as large as segments (loopback).
    """
    one_millisecond = rate // 8 // 1000
    smallest = WHOLE_SEGMENT_BYTES if whole_segments else SMALLEST_BURST_BYTES
    small = max(smallest, min(WHOLE_SEGMENT_BYTES, one_millisecond))
    return max(small, int(rate / 8 * TIMER_SLACK_S))


def choose_queue(rate: int) -> int:
    """Return how many bytes may wait: enough that several senders to one host lose no packets."""
    return max(SMALLEST_QUEUE_BYTES, int(rate / 8 * QUEUE_S))


def shape(
    link: Any, index: int, rate: int, whole_segments: bool = False, *, again: bool = False
) -> None:
    """Put a token bucket on the sending side of an interface, or change the one there `again`; `link` is a pyroute2 socket."""
    burst = choose_burst(rate, whole_segments)
    link.tc(
        "change" if again else "add",
        "tbf",
        index,
        handle=0x10000,
        rate=rate // 8,
        burst=burst,
        limit=burst + choose_queue(rate),
    )


def delay(link: Any, index: int, latency_us: int, below_bucket: bool) -> None:
    """Delay what an interface sends: inside its token bucket if it has one, else directly."""
    parent = {"parent": 0x10001} if below_bucket else {}
    link.tc(
        "add", "netem", index, handle=0x20000, delay=latency_us, limit=NETEM_QUEUE_PACKETS, **parent
    )
