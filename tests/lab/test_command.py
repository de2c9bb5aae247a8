from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from thinwire.errors import UsageError
from thinwire.lab.check import CheckReport, Measurement, refuse_above
from thinwire.lab.command import CONTEXT_SETTINGS, lab, show_check
from thinwire.lab.topology import LabSpec


def run_lab(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command(context_settings=CONTEXT_SETTINGS)(lab)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, UsageError):
        raise result.exception
    return result.exit_code, result.output


def test_help_shows_a_real_example() -> None:
    exit_code, output = run_lab("--help")
    assert exit_code == 0
    assert "thinwire lab --hosts 4 --rate 10gbit" in output


@pytest.mark.root
def test_a_run_prints_lines_and_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    exit_code, output = run_lab(
        "--hosts", "2", "--rate", "1gbit", "--rate", "host2=50mbit", "--counters", str(path),
        "--", "sh", "-c", "echo $RANK of $WORLD_SIZE; exit 4",
    )  # fmt: skip
    assert exit_code == 4
    assert "of 2" in output
    assert "failed with exit code 4" in output
    assert "what crossed each host's link" in output
    found = json.loads(path.read_text())
    assert [host["rate"] for host in found["hosts"]] == ["1gbit", "50mbit"]
    assert found["exit_code"] == 4


def test_a_dry_run_shows_hosts_links_and_command() -> None:
    arguments = (
        "--hosts 2 --ranks-per-host 2 --rate 1gbit --rate host2=50mbit --check --dry-run -- sh -c"
    )
    exit_code, output = run_lab(*arguments.split(), "echo $RANK")
    assert exit_code == 0
    assert output.splitlines() == [
        "host1: link 1gbit, ranks 0 to 1",
        "host2: link 50mbit, ranks 2 to 3",
        "inside a host: unshaped; added latency: 0ms",
        "measured: every link alone and all at once",
        "each rank runs: sh -c 'echo $RANK'",
    ]


@pytest.mark.root
def test_options_of_the_command_stay_with_the_command() -> None:
    exit_code, output = run_lab("--hosts", "1", "echo", "--hosts", "7")
    assert exit_code == 0
    assert "[host1 rank 0] --hosts 7" in output


@pytest.mark.root
def test_clean_and_its_refusal() -> None:
    assert run_lab("--clean") == (0, "nothing was left behind\n")
    with pytest.raises(UsageError, match='"eth0" is not a lab'):
        run_lab("--clean", "eth0")


@pytest.mark.root
def test_check_measures_and_prints_the_ceiling() -> None:
    exit_code, output = run_lab("--hosts", "1", "--rate", "100mbit", "--check")
    # Whether the rate holds depends on what else the machine does.
    assert exit_code == ("5% off" in output)
    assert "ceiling, unshaped:" in output
    assert "host1 sends" in output


def test_check_fails_beyond_five_percent(capsys: pytest.CaptureFixture[str]) -> None:
    links = tuple(Measurement(f"link {number}", 10**9, 9e8, 9.4e8) for number in range(6))
    with pytest.raises(typer.Exit) as ended:
        show_check(CheckReport(1e12, links))
    assert ended.value.exit_code == 1
    assert "6 of 6 measurements are more than 5% off" in capsys.readouterr().err


def test_rates_above_the_ceiling_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rate of host1 is 10gbit, .* ceiling is 5.0gbit"):
        refuse_above(LabSpec(hosts=2, rate="10gbit"), 5e9)
    with pytest.raises(UsageError, match="local_rate is 6gbit"):
        refuse_above(LabSpec(hosts=2, rate="1gbit", local_rate="6gbit"), 5e9)


def test_five_percent_is_the_border() -> None:
    assert Measurement("link", 1000, 900, 951).ok
    assert not Measurement("link", 1000, 900, 949).ok
    assert not Measurement("link", 1000, 1000, 1051).ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "2"), "the command is empty"),
        (("--timeout", "0", "--", "true"), "timeout is 0"),
        (("--rate", "host5=1gbit", "--", "true"), "host1 to host2"),
        (("--", "no-such-program"), '"no-such-program"'),
    ],
)
def test_wrong_settings_are_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_lab(*arguments)
