from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire.lab.counters import Counters, HostTraffic, Traffic, read_own_counters, write_json
from thinwire.lab.shaping import WHOLE_SEGMENT_BYTES, choose_burst, choose_queue


def test_payload_is_bytes_less_one_header_per_packet() -> None:
    counters = Counters(tx_bytes=66_066, tx_packets=1, rx_bytes=660, rx_packets=10)
    assert (counters.tx_payload, counters.rx_payload) == (66_000, 0)


def test_what_tcp_sent_again_is_no_payload() -> None:
    packets = 10
    counters = Counters(tx_bytes=packets * 1514, tx_packets=packets, resent_packets=3)
    assert counters.tx_payload == 7 * 1448


def test_traffic_is_the_difference_of_two_readings(tmp_path: Path) -> None:
    def reading(count: int) -> Traffic:
        counters = Counters(count * 10_000, count, count * 2000, count, resent_packets=count)
        return Traffic((HostTraffic("host1", "10.64.0.1", 10**9, counters, counters),))

    rows = (reading(5) - reading(2)).as_rows()
    assert rows[0]["tx_bytes"] == 30_000
    assert rows[0]["resent_packets"] == 3
    assert rows[0]["rx_payload"] == 6000 - 3 * 66
    assert rows[0]["rate"] == "1gbit"
    write_json(tmp_path / "counters.json", rows, exit_code=0)
    assert json.loads((tmp_path / "counters.json").read_text()) == {"exit_code": 0, "hosts": rows}


def test_a_process_reads_its_own_interfaces() -> None:
    assert read_own_counters("lo").rx_packets >= 0
    with pytest.raises(UsageError, match='no interface "eth99"'):
        read_own_counters("eth99")


def test_buckets_are_small_where_they_can_be_and_large_where_they_must() -> None:
    assert choose_burst(10**8) == 32 * 1024
    assert choose_burst(10**9) == WHOLE_SEGMENT_BYTES
    assert choose_burst(10**10) > 250_000
    assert choose_burst(10**8, whole_segments=True) == WHOLE_SEGMENT_BYTES
    assert choose_queue(10**9) >= 4 * 1024 * 1024
