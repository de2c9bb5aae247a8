from __future__ import annotations

import pytest

from thinwire.errors import UsageError
from thinwire.lab.rates import format_rate, parse_host_rates, parse_latency, parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10gbit", 10_000_000_000),
        ("500mbit", 500_000_000),
        ("2.5Gbit/s", 2_500_000_000),
        (" 1 gbit ", 1_000_000_000),
        ("1500kbit", 1_500_000),
        ("unshaped", None),
    ],
)
def test_rates_as_people_write_them(text: str, bits: int | None) -> None:
    assert parse_rate(text) == bits
    assert parse_rate(format_rate(bits)) == bits


@pytest.mark.parametrize("text", ["", "10", "10gbps", "10 GB/s", "-1gbit", "fast", "1e9bit"])
def test_other_spellings_are_refused_with_the_field_and_the_value(text: str) -> None:
    with pytest.raises(UsageError, match=r"local_rate is .*kbit, mbit or gbit") as error:
        parse_rate(text, "local_rate")
    assert f'"{text}"' in str(error.value)


@pytest.mark.parametrize("text", ["0mbit", "999kbit", "35gbit"])
def test_rates_outside_the_token_bucket_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="from 1mbit to 34gbit"):
        parse_rate(text)


def test_a_named_rate_overrides_the_plain_one_in_any_order() -> None:
    expected = (10**10, 10**9, 10**10)
    assert parse_host_rates(["10gbit", "host2=1gbit"], 3) == expected
    assert parse_host_rates(["host2=1gbit", "10gbit"], 3) == expected
    assert parse_host_rates([], 2) == (None, None)
    assert parse_host_rates(["host1=unshaped", "1gbit"], 2) == (None, 10**9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["host3=1gbit"], "the hosts of this lab are host1 to host2"),
        (["host0=1gbit"], "host1 to host2"),
        (["node1=1gbit"], "host1 to host2"),
        (["1gbit", "2gbit"], "given twice"),
        (["host1=1gbit", "host1=2gbit"], "second rate for host1"),
        (["host1=quick"], "rate of host1"),
    ],
)
def test_wrong_host_rates(settings: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_host_rates(settings, 2)


def test_latencies() -> None:
    assert [parse_latency(text) for text in ("0", "0ms", "500us", "2ms", "0.5s")] == [
        0,
        0,
        500,
        2000,
        500_000,
    ]
    for text in ("1", "fast", "-1ms", "11s"):
        with pytest.raises(UsageError, match="latency is"):
            parse_latency(text)
