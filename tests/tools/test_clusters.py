from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.tools.clusters import drop_options
from thinwire.tools.hosts import Host, read_hosts
from thinwire.tools.launch_files import KINDS, Terms, launch_file

PROGRAM = [
    "-m",
    "thinwire",
    "train",
    "digits",
    "--out",
    'it\'s a "new" $HOME `dir`',
    "--set",
    "a=*;b&c",
    "",
]
HOSTS = [Host("alpha", 2), Host("beta.example.org", 2)]


def run_bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def make_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interface", [None, "eth0"])
def test_scripts_are_correct_bash(tmp_path, kind, interface):
    script = launch_file(kind, PROGRAM, hosts=HOSTS, interface=interface, folder="/a folder/it's")
    path = tmp_path / "script.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    assert ("GLOO_SOCKET_IFNAME=eth0" in script) == (interface is not None)
    assert ("NCCL_SOCKET_IFNAME=eth0" in script) == (interface is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_host_gets_the_command_word_for_word(tmp_path, kind):
    """With programs in place of ssh, srun and scontrol that show what they are told to run."""
    folder = tmp_path / "a folder's"
    folder.mkdir()
    # Written at once, because both hosts write to the same place.
    python = make_program(
        tmp_path / "my python",
        r"""line=$(printf '%s|' "$PWD" "$GLOO_SOCKET_IFNAME" "$@"); printf '%s\n' "$line" """,
    )
    make_program(tmp_path / "srun", r"""shift; "$@"; "$@" """)
    make_program(tmp_path / "scontrol", r"""printf 'alpha\nbeta.example.org\n'""")
    remote = make_program(tmp_path / "remote", r"""shift; bash -c "$*" """)
    (tmp_path / "nodes").write_text("alpha\nalpha\nbeta.example.org\n")
    script = launch_file(
        kind, PROGRAM, hosts=HOSTS, interface="lo", python=python, folder=str(folder)
    )
    ended = run_bash(
        script,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        REMOTE_SHELL=remote,
        SLURM_JOB_NODELIST="alpha,beta.example.org",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="7",
        PBS_NODEFILE=str(tmp_path / "nodes"),
        PBS_JOBID="7.server",
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        words = line.split("|")[:-1]
        assert words[:4] == [str(folder), "lo", "-m", "torch.distributed.run"]
        assert words[4:8] == ["--nnodes", "2", "--nproc-per-node", "2"]
        assert any(word.startswith("alpha:2") for word in words)
        assert words[-len(PROGRAM) :] == PROGRAM


def test_a_host_that_fails_fails_the_script():
    script = launch_file("torchrun", ["train"], hosts=HOSTS, python="false")
    assert run_bash(script, REMOTE_SHELL="true").returncode == 0
    assert run_bash(script, REMOTE_SHELL="false").returncode == 1


def test_slots_differ_only_where_that_can_work():
    uneven = [Host("a", 2), Host("b")]
    assert "slots=(2 3)" in launch_file("torchrun", [], hosts=uneven, per_host=3)
    for kind in ("slurm", "pbs"):
        with pytest.raises(UsageError, match=r"different slots \[2, 3\]"):
            launch_file(kind, [], hosts=uneven, per_host=3)
        assert "host" not in launch_file(kind, [], per_host=3).split("set -e")[0]


def test_hosts_are_read_with_slots_and_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two machines\nalpha slots=4\n\nbeta   # with the old cable\n10.0.0.3\n")
    assert read_hosts(path) == [Host("alpha", 4), Host("beta"), Host("10.0.0.3")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no machine"),
        ("alpha slots=0", "must be NAME or NAME slots=N"),
        ("alpha gpus=2", "must be NAME or NAME slots=N"),
        ("alpha slots=2 slots=3", "line 1 of"),
        ("a\na", "names 'a' twice"),
        ("-oProxyCommand=x", "names the machine '-oProxyCommand=x'"),
    ],
)
def test_a_wrong_hosts_file_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        read_hosts(path)


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_hosts(tmp_path / "missing")
    with pytest.raises(UsageError, match="launcher is 'lsf'; it must be one of 'slurm'"):
        launch_file("lsf", [])
    with pytest.raises(UsageError, match="no hosts"):
        launch_file("torchrun", [])
    with pytest.raises(UsageError, match="interface is 'eth0; rm'"):
        launch_file("slurm", [], interface="eth0; rm")
    with pytest.raises(UsageError, match="cannot reach it by that name"):
        launch_file("torchrun", [], hosts=[Host("localhost"), Host("b")])


def test_what_is_for_the_script_is_not_in_it():
    typed = ["train", "digits", "--workers", "4", "--print-launch=slurm", "--hosts", "f", "--lr=1"]
    assert drop_options(typed) == ["train", "digits", "--lr=1"]


TERMS = Terms(
    nodes=2, time="1-02:00:00", partition="gpu", account="physics", output="log.txt", requeue=True
)


def test_slurm_is_asked_for_what_was_said():
    asked = launch_file("slurm", ["train.py"], per_host=4, terms=TERMS).split("set -e")[0]
    for line in (
        "nodes=2", "time=1-02:00:00", "partition=gpu", "account=physics", "output=log.txt", "requeue",
    ):  # fmt: skip
        assert f"#SBATCH --{line}\n" in asked
    assert "--time" not in launch_file("slurm", ["train.py"])


def test_pbs_is_asked_for_what_was_said():
    asked = launch_file("pbs", ["train.py"], per_host=4, terms=TERMS).split("set -e")[0]
    for line in (
        "l select=2:ncpus=4:mpiprocs=1", "l walltime=26:00:00", "q gpu", "A physics", "o log.txt", "r y",
    ):  # fmt: skip
        assert f"#PBS -{line}\n" in asked


def test_ssh_has_no_queue_and_nodes_are_counted_once():
    for terms in (Terms(time="1:00:00"), Terms(partition="a"), Terms(requeue=True)):
        with pytest.raises(UsageError, match="no queue to ask"):
            launch_file("torchrun", ["train.py"], hosts=HOSTS, terms=terms)
    with pytest.raises(UsageError, match="nodes is 3, but hosts names 2"):
        launch_file("slurm", ["train.py"], hosts=HOSTS, terms=Terms(nodes=3))
    for wrong in ({"time": "soon"}, {"partition": "a b"}, {"output": "a\n#SBATCH -x"}):
        with pytest.raises(UsageError):
            Terms(**wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_data_is_named_before_anything_starts(tmp_path, kind):
    """With the programs of a cluster replaced by what they do on one machine."""
    make_program(tmp_path / "srun", 'shift; exec "$@"')
    make_program(tmp_path / "scontrol", "echo localhost")
    (tmp_path / "nodes").write_text("localhost\n")
    (tmp_path / "here").touch()
    for data, code in (("here", 0), ("here,gone", 1)):
        script = launch_file(
            kind,
            ["train.py"],
            hosts=[Host("localhost", 1)],
            python="true",
            folder=str(tmp_path),
            terms=Terms(data=tuple(data.split(","))),
        )
        ended = run_bash(
            script,
            PATH=f"{tmp_path}:{os.environ['PATH']}",
            SLURM_JOB_NODELIST="localhost",
            SLURM_JOB_NUM_NODES="1",
            SLURM_JOB_ID="7",
            PBS_NODEFILE=str(tmp_path / "nodes"),
            PBS_JOBID="7.server",
        )
        assert ended.returncode == code, ended.stderr
        assert ("has no gone" in ended.stderr) == (code == 1)


def test_an_interrupted_script_says_how_to_go_on(tmp_path):
    sleeper = make_program(tmp_path / "sleeper", "echo started; exec sleep 60")
    script = launch_file("torchrun", ["train.py"], hosts=[Host("localhost")], python=sleeper)
    with subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and "goes on from its last checkpoint" in said


# tests/tools/test_launch_command.py has a script of its own that really runs.
@pytest.mark.slow
def test_a_benchmark_really_runs_by_its_script(tmp_path, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    command = ["bench", "exchange", "--methods", "dense", "--count", "1000", "--iters", "1"]
    launch = ["--print-launch", "torchrun", "--hosts", str(hosts), "--interface", "lo"]
    assert main([*command, *launch]) == 0
    ended = run_bash(capsys.readouterr().out)
    assert ended.returncode == 0, ended.stderr
    assert "dense" in ended.stdout
    assert main(["bench", "exchange", "--methods", "no", *launch]) == 2
