from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.lab.conftest import names_left
from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec
from thinwire.lab import network as lab_network
from thinwire.lab.check import TOLERANCE, measure_streams
from thinwire.lab.counters import HEADER_BYTES, PACKET_PAYLOAD
from thinwire.lab.topology import Host

WORKER = Path(__file__).with_name("all_reduce_worker.py")
TALK = Path(__file__).with_name("talk.py")
MEGABYTES = 16
RANK_ONE_FAILS = "if [ $RANK = 1 ]; then until [ -e {spoken} ]; do sleep 0.05; done; {failure}; fi"


@pytest.mark.root
def test_counters_agree_with_the_bytes_of_a_ring_all_reduce() -> None:
    with Lab(LabSpec(hosts=2, rate="500mbit")) as lab:
        result = lab.run([sys.executable, str(WORKER), str(MEGABYTES)], timeout_s=60)
    assert (result.exit_code, result.reason) == (0, "")
    ring = 2 * (2 - 1) / 2 * MEGABYTES * 1e6
    resent = PACKET_PAYLOAD * sum(host.link.resent_packets for host in result.traffic.hosts)
    for host, rank in zip(result.traffic.hosts, result.ranks, strict=True):
        assert host.link.tx_payload == pytest.approx(ring, rel=0.03)
        # What the other host sent again is received again.
        assert 0.97 * ring < host.link.rx_payload < 1.03 * ring + resent
        words = rank.output.split()
        assert words[:3] == ["sum", "3", "sent"]
        assert int(words[3]) == pytest.approx(ring, rel=0.03)


@pytest.mark.root
def test_ranks_of_one_host_talk_over_its_loopback() -> None:
    with Lab(LabSpec(hosts=1, ranks_per_host=2, rate="10mbit")) as lab:
        result = lab.run([sys.executable, str(WORKER), str(MEGABYTES)], timeout_s=60)
    assert result.exit_code == 0
    (host,) = result.traffic.hosts
    assert host.inside.tx_payload == pytest.approx(2 * MEGABYTES * 1e6, rel=0.03)
    assert host.link.tx_payload < 10_000


@pytest.mark.root
def test_rates_hold_each_way_and_differ_between_hosts() -> None:
    rates = ["200mbit", "host2=50mbit", "host3=unshaped"]
    with Lab(LabSpec(hosts=3, rate=rates, local_rate="100mbit")) as lab:
        fast, slow, free = lab.topology.hosts
        headers = 1514 / (1514 - HEADER_BYTES)
        for pair, expected in (
            ((fast, free), 200e6),
            ((free, fast), 200e6),
            ((slow, free), 50e6),
            ((free, slow), 50e6),
            ((fast, slow), 50e6),
        ):
            assert headers * fastest(lab, pair, expected / headers) == pytest.approx(
                expected, rel=TOLERANCE
            )
        assert fastest(lab, (fast, fast), 100e6) == pytest.approx(100e6, rel=TOLERANCE)


def fastest(lab: Lab, pair: tuple[Host, Host], expected: float) -> float:
    """Of some tries: a busy machine may not fill a link, but nothing makes it faster than it is."""
    found = 0.0
    for _ in range(8):
        found = max(found, *measure_streams(lab.topology, [pair]))
        if found > (1 - TOLERANCE) * expected:
            break
    return found


@pytest.mark.root
@pytest.mark.parametrize(("failure", "exit_code"), [("kill -9 $$", 137), ("exit 3", 3)])
def test_one_rank_failing_ends_the_run(failure: str, exit_code: int, tmp_path: Path) -> None:
    lines: list[str] = []
    spoken = tmp_path / "spoken"

    def listen(line: str, stream: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            spoken.touch()

    with Lab(LabSpec(hosts=2)) as lab:
        fails = RANK_ONE_FAILS.format(spoken=spoken, failure=failure)
        result = lab.run(["sh", "-c", f"echo hello; {fails}; sleep 100"], echo=listen)
    assert result.exit_code == exit_code
    assert result.seconds < 60
    assert [rank.stopped for rank in result.ranks] == [True, False]
    assert result.reason.startswith("rank 1 on host2")
    assert sorted(lines) == ["[host1 rank 0] hello", "[host2 rank 1] hello"]
    assert names_left(lab.name) == []


@pytest.mark.root
def test_time_up_ends_ranks_that_do_not_want_to_and_their_children() -> None:
    marker = str(time.time_ns())
    with Lab(LabSpec(hosts=1)) as lab:
        script = f"trap '' TERM; setsid sh -c 'sleep 60; : {marker}' & while :; do sleep 1; done"
        result = lab.run(["sh", "-c", script], timeout_s=0.3)
        commands = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _holds(path, marker)]
    assert result.exit_code == 124
    assert commands == []


@pytest.mark.root
def test_two_labs_side_by_side_do_not_meet() -> None:
    reach = "import socket; socket.create_connection(('{}', 1), timeout=0.3)"
    with Lab(LabSpec(hosts=1)) as one, Lab(LabSpec(hosts=1)) as other:
        assert one.name != other.name
        assert one.topology.network != other.topology.network
        address = other.topology.hosts[0].address
        result = one.run([sys.executable, "-c", reach.format(address)])
        assert "Network is unreachable" in result.ranks[0].output
    assert names_left(one.name) + names_left(other.name) == []


@pytest.mark.root
def test_reading_often_leaves_the_lab_alone() -> None:
    # The library that enters namespaces forks children and ends them by a signal that we handle.
    with Lab(LabSpec(hosts=1)) as lab:
        for _ in range(30):
            lab.traffic()
        assert len(names_left(lab.name)) == 2


@pytest.mark.root
def test_an_error_in_the_block_or_while_building_leaves_nothing() -> None:
    with pytest.raises(RuntimeError, match="mine"), Lab(LabSpec(hosts=2)) as lab:
        raise RuntimeError("mine")
    assert names_left(lab.name) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab_network, "shape", _fail)
        building = Lab(LabSpec(hosts=2, rate="1gbit"))
        with pytest.raises(RuntimeError, match="no bucket"):
            building.__enter__()
    assert names_left(building.name) == []


@pytest.mark.root
def test_latency_is_added_by_the_kernel_or_by_a_relay() -> None:
    with Lab(LabSpec(hosts=2, rate="100mbit", latency="20ms")) as lab:
        result = lab.run([sys.executable, str(TALK)], timeout_s=30)
        assert result.exit_code == 0, [rank.output for rank in result.ranks]
        name = lab.name
    fastest, moved = json.loads(result.ranks[1].output)
    # There and back.
    assert fastest >= 0.04 and moved == 500_000
    # A packet that resets a connection has a shorter header than the one that is taken off each.
    assert result.traffic.hosts[1].link.tx_payload == pytest.approx(moved, rel=0.03)
    assert names_left(name) == []


def test_without_root_one_sentence_points_at_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UsageError, match=r"needs root .*thinwire bench exchange --virtual"):
        Lab(LabSpec()).__enter__()


@pytest.mark.root
@pytest.mark.parametrize(("command", "message"), [([], "empty"), (["no-such"], '"no-such"')])
def test_a_command_that_cannot_run_is_one_sentence(command: list[str], message: str) -> None:
    with Lab(LabSpec(hosts=1)) as lab, pytest.raises(UsageError, match=message):
        lab.run(command)


def _holds(path: Path, marker: str) -> bool:
    try:
        return marker in path.read_text()
    except OSError:
        return False


def _fail(*arguments: object, **settings: object) -> None:
    raise RuntimeError("no bucket")
