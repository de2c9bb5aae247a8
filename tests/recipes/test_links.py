"""What --link asks for, and when there is no link to be had."""

from __future__ import annotations

import pytest

from thinwire.errors import UsageError
from thinwire.recipes.config import Running
from thinwire.recipes.device import choose_device
from thinwire.recipes.job import build_job
from thinwire.recipes.links import settle_link


def test_auto_is_a_slow_link_or_none() -> None:
    assert settle_link(Running()) == (Running(), "")
    assert settle_link(Running(link="auto"), lambda running: "") == (Running(link="50mbit"), "")
    assert settle_link(Running(link="auto"), lambda running: "no.") == (Running(), "no.")
    with pytest.raises(UsageError, match=r"link is .1gbit., which cannot be had here: no\."):
        settle_link(Running(link="1gbit"), lambda running: "no.")


def test_workers_without_a_network_of_their_own_have_no_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="simulated workers are one process"):
        settle_link(Running(link="1gbit", simulate_workers=4))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "need root" in settle_link(Running(link="auto"))[1]
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert "started by a launcher" in settle_link(Running(link="auto"))[1]


@pytest.mark.parametrize("link", ["fast", "1", "unshaped", "1kbit", 50])
def test_a_link_is_a_rate(link: object) -> None:
    with pytest.raises(UsageError, match="link is"):
        Running(link=link)  # type: ignore[arg-type]


def test_emulated_hosts_do_not_share_a_gpu_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert choose_device(Running(link="1gbit")).type == "cpu"


def test_times_of_another_link_are_not_taken_for_ones_own() -> None:
    settings = {"task": {"name": "digits"}, "compare": {"target": 0.95}, "run": {"link": "50mbit"}}
    job = build_job("compare", settings, out=None)
    assert job.cells()[0].about["link"] == "50mbit"
    again = build_job("compare", job.to_settings(), out=None)
    assert (again.target, again.running.link) == (0.95, "50mbit")
