"""Under sudo: COMMAND runs as the user, and records that others could have written are not believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.lab.test_cleaning import DEAD, forge
from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec, clean
from thinwire.lab.accounts import invoking_user
from thinwire.lab.records import load_records, run_directory

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
WHO = ["sh", "-c", "grep -E '^(Uid|Gid|Groups):' /proc/self/status; echo $LOGNAME"]


@pytest.fixture
def sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sudo tells root about its caller."""
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    monkeypatch.setenv("SUDO_GID", str(NOBODY))


def who(**how: bool) -> str:
    with Lab(LabSpec(hosts=1)) as lab:
        result = lab.run(WHO, **how)
    assert result.exit_code == 0, result.ranks[0].output
    return " ".join(result.ranks[0].output.split())


@pytest.mark.root
def test_the_command_runs_as_the_user_who_called_sudo(sudo: None) -> None:
    four = " ".join([str(NOBODY)] * 4)
    assert who() == f"Uid: {four} Gid: {four} Groups: {NOBODY} nobody"
    assert who(as_root=True).startswith("Uid: 0 0 0 0 Gid: 0 0 0 0")


@pytest.mark.root
def test_without_sudo_it_stays_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert who().startswith("Uid: 0 0 0 0")


@AS_ROOT
def test_who_called(sudo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    account = invoking_user()
    assert account is not None and (account.uid, account.gid) == (NOBODY, NOBODY)
    monkeypatch.setenv("SUDO_UID", "0")
    assert invoking_user() is None
    monkeypatch.setenv("SUDO_UID", "me")
    with pytest.raises(UsageError, match="SUDO_UID is 'me'; it must be the number"):
        invoking_user()


@AS_ROOT
def test_a_folder_of_somebody_else_is_refused(run_dir: Path) -> None:
    run_dir.mkdir()
    for owner, mode in ((NOBODY, 0o700), (0, 0o777)):
        os.chown(run_dir, owner, owner)
        run_dir.chmod(mode)
        with pytest.raises(UsageError, match="it must belong to you, be no link, and be closed"):
            run_directory()
    run_dir.rmdir()
    run_dir.symlink_to("/tmp")
    with pytest.raises(UsageError, match="be no link"):
        run_directory()
    run_dir.unlink()


@AS_ROOT
def test_a_record_of_somebody_else_is_refused(run_dir: Path) -> None:
    forge(run_dir, "tw0000000d", {})
    path = run_dir / "tw0000000d.json"
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="was not written by you"):
        load_records()
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="was not written by you"):
        load_records()
    path.unlink()


@pytest.mark.parametrize("text", ["{", "7", "[]", '{"name": "tw0000000f"}', "\0", "[" * 100_000])
def test_a_damaged_record_is_one_sentence(text: str, run_dir: Path) -> None:
    run_dir.mkdir()
    path = run_dir / "tw0000000e.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"tw0000000e.json' is damaged"):
        load_records()
    path.unlink()


@pytest.mark.root
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_at_another_place_is_not_removed(
    linked: bool, run_dir: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    run_dir.mkdir()
    own = run_dir / "tw0000000a-mps"
    if linked:
        own.symlink_to(precious)
    else:
        own.mkdir()
    named = own if linked else precious
    about = {"name": "tw0000000a", "network": "10.64.0.0/24", **DEAD, "mps_directory": str(named)}
    record = run_dir / "tw0000000a.json"
    record.write_text(json.dumps(about))
    with pytest.raises(UsageError, match="was not created by lab tw0000000a"):
        clean()
    assert (precious / "file").exists()
    record.unlink()
    own.unlink() if linked else own.rmdir()
