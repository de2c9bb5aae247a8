"""Link rates and latencies as people write them: "10gbit", "host2=1gbit", "500us"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from thinwire.errors import UsageError

UNSHAPED = "unshaped"
"""The word for a link that no token bucket slows down."""

MINIMUM_RATE = 1_000_000
"""Below 1 mbit one full-sized burst lasts for a noticeable part of a second."""

MAXIMUM_RATE = 34_000_000_000
"""The kernel's token bucket takes its rate as 32 bits of bytes per second (34.36 gbit)."""

MAXIMUM_LATENCY_US = 10_000_000

_RATE_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIME_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:/s)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)
_HOST = re.compile(r"host([1-9]\d*)")


def parse_rate(text: str, field: str = "rate") -> int | None:
    """Return bits per second, or None for "unshaped"; `field` names the setting in errors."""
    if text.strip().lower() == UNSHAPED:
        return None
    bits = parse_bits(text, field)
    if not MINIMUM_RATE <= bits <= MAXIMUM_RATE:
        raise UsageError(
            f"{field} is {text}, but the kernel's token bucket is used from "
            f"{format_rate(MINIMUM_RATE)} to {format_rate(MAXIMUM_RATE)} here."
        )
    return bits


def parse_bits(text: str, field: str = "rate") -> int:
    """Bits per second of any link, of this machine or not."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f'{field} is "{text}", but a rate is a number with kbit, mbit or gbit '
            f'(such as 10gbit or 500mbit) or "{UNSHAPED}".'
        )
    return round(float(match[1]) * _RATE_UNITS[match[2].lower()])


def format_rate(bits: float | None) -> str:
    """Return the usual spelling, which `parse_rate` reads back: 10gbit, 1.5gbit, 200mbit."""
    if bits is None:
        return UNSHAPED
    for unit, scale in (("gbit", 10**9), ("mbit", 10**6)):
        if bits >= scale:
            return f"{bits / scale:.10g}{unit}"
    return f"{bits / 10**3:.10g}kbit"


def parse_host_rates(settings: Sequence[str], hosts: int) -> tuple[int | None, ...]:
    """Return one rate per host; a plain rate is for all, `hostN=RATE` for one.

    1. A plain rate (at most one) is the default; without one links are unshaped.
    2. Named rates override it, whatever the order they are given in.
    """
    default: int | None = None
    named: dict[int, int | None] = {}
    plain_seen: str | None = None
    for setting in settings:
        host, separator, text = setting.partition("=")
        if not separator:
            if plain_seen is not None:
                raise UsageError(
                    f"rate is given twice for all hosts ({plain_seen} and {setting}), but only one "
                    "plain rate is allowed; write hostN=RATE for a single host."
                )
            plain_seen, default = setting, parse_rate(setting)
            continue
        index = _host_index(host.strip(), setting, hosts)
        if index in named:
            raise UsageError(
                f'rate "{setting}" is a second rate for {host.strip()}, but one is allowed.'
            )
        named[index] = parse_rate(text, f"rate of {host.strip()}")
    return tuple(named.get(index, default) for index in range(hosts))


def parse_latency(text: str) -> int:
    """Return microseconds; "0" and "0ms" mean no added delay."""
    if text.strip() == "0":
        return 0
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f'latency is "{text}", but a latency is a number with us, ms or s (such as 500us or 2ms).'
        )
    microseconds = round(float(match[1]) * _TIME_UNITS_US[match[2].lower()])
    if microseconds > MAXIMUM_LATENCY_US:
        raise UsageError(f"latency is {text}, but at most 10s is allowed.")
    return microseconds


def _host_index(name: str, setting: str, hosts: int) -> int:
    match = _HOST.fullmatch(name)
    if match is None or int(match[1]) > hosts:
        raise UsageError(
            f'rate "{setting}" names the host "{name}", but the hosts of this lab are '
            f"host1 to host{hosts}."
        )
    return int(match[1]) - 1
