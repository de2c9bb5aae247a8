from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import OpenerDirector, Request

import pytest

from thinwire.errors import UsageError
from thinwire.recipes.data import download
from thinwire.recipes.data.source import Found, Remote, Source, locate
from thinwire.recipes.examples import DataOptions

CONTENT = b"some data"


def tar_of(path: Path, member: str) -> None:
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size = len(CONTENT)
        archive.addfile(info, io.BytesIO(CONTENT))


def zip_of(path: Path, member: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, CONTENT)


def describe(served: Path, path: str, unpack: bool = False, checksum: str | None = None) -> Source:
    """One file, to be had at a file: address."""
    digest = hashlib.sha256(served.read_bytes()).hexdigest() if served.exists() else "0"
    remote = Remote(
        url=served.as_uri(), path=path, checksum=checksum or f"sha256:{digest}", unpack=unpack
    )
    return Source(name="Toy", layouts={"plain": ("toy/data.bin",)}, remotes=(remote,))


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


PLAIN = Source(
    name="Toy",
    layouts={"two": ("toy/a", "toy/b"), "five": tuple(f"other/{i}" for i in range(5))},
)


def test_any_complete_layout_will_do(home: Path) -> None:
    (home / "other").mkdir()
    for i in range(5):
        (home / "other" / str(i)).touch()
    paths = tuple(home / "other" / str(i) for i in range(5))
    assert locate(PLAIN, DataOptions(data_dir=home)) == Found("five", paths)


def test_the_folder_may_come_from_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(name="Toy", layouts={"wild": ("toy/*.bin",)})
    (home / "toy").mkdir()
    for name in ("b.bin", "a.bin"):
        (home / "toy" / name).touch()
    monkeypatch.setenv("THINWIRE_DATA", str(home))
    assert locate(source, DataOptions()).paths == (home / "toy" / "a.bin",)


def test_no_folder_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    with pytest.raises(UsageError, match="data_dir is not given, but Toy is read from a folder"):
        locate(PLAIN, DataOptions())


def test_a_folder_that_is_none_is_one_sentence(home: Path) -> None:
    with pytest.raises(UsageError, match=r"data_dir is '.*nowhere'; it must be a folder"):
        locate(PLAIN, DataOptions(data_dir=home / "nowhere"))


def test_missing_files_are_named(home: Path) -> None:
    (home / "toy").mkdir()
    (home / "toy" / "a").touch()
    with pytest.raises(
        UsageError,
        match=r"^Toy is not complete in .*home: toy/b is missing; put it there or use --synthetic$",
    ):
        locate(PLAIN, DataOptions(data_dir=home))


def test_many_missing_files_are_counted(home: Path) -> None:
    source = Source(name="Toy", layouts={"five": PLAIN.layouts["five"]}, obtain="ask Bob")
    with pytest.raises(
        UsageError, match=r"other/2 and 2 more are missing; put them there \(ask Bob"
    ):
        locate(source, DataOptions(data_dir=home))


def test_download_is_offered_where_there_is_one(served: Path, home: Path) -> None:
    source = describe(served / "data.bin", "toy/data.bin")
    with pytest.raises(UsageError, match="put it there, fetch the set with --download or use"):
        locate(source, DataOptions(data_dir=home))


def test_a_plain_file_is_fetched(served: Path, tmp_path: Path) -> None:
    (served / "data.bin").write_bytes(CONTENT)
    source = describe(served / "data.bin", "toy/data.bin")
    options = DataOptions(data_dir=tmp_path / "new", download=True)
    (path,) = locate(source, options).paths
    assert path.read_bytes() == CONTENT
    (served / "data.bin").unlink()
    assert locate(source, options).paths == (path,)


@pytest.mark.parametrize(("pack", "suffix"), [(tar_of, ".tar.gz"), (zip_of, ".zip")])
def test_an_archive_is_unpacked_and_goes(
    pack: object, suffix: str, served: Path, home: Path
) -> None:
    assert callable(pack)
    pack(served / f"toy{suffix}", "toy/data.bin")
    source = describe(served / f"toy{suffix}", f"toy{suffix}", unpack=True)
    (path,) = locate(source, DataOptions(data_dir=home, download=True)).paths
    assert path.read_bytes() == CONTENT
    assert not (home / f"toy{suffix}").exists()


def test_an_archive_that_was_carried_here_is_used_and_stays(served: Path, home: Path) -> None:
    tar_of(home / "toy.tar.gz", "toy/data.bin")
    digest = hashlib.sha256((home / "toy.tar.gz").read_bytes()).hexdigest()
    source = describe(
        served / "gone.tar.gz", "toy.tar.gz", unpack=True, checksum=f"sha256:{digest}"
    )
    locate(source, DataOptions(data_dir=home, download=True))
    assert (home / "toy.tar.gz").exists()


def test_a_wrong_checksum_leaves_nothing(served: Path, home: Path) -> None:
    (served / "data.bin").write_bytes(CONTENT)
    source = describe(served / "data.bin", "toy/data.bin", checksum="md5:0")
    with pytest.raises(UsageError, match=r"has the md5 .*, but 0 is the official one; it was rem"):
        locate(source, DataOptions(data_dir=home, download=True))
    assert list((home / "toy").iterdir()) == []


def test_a_carried_file_with_a_wrong_checksum_is_named(served: Path, home: Path) -> None:
    (home / "toy.zip").write_bytes(CONTENT)
    source = describe(served / "toy.zip", "toy.zip", unpack=True, checksum="md5:0")
    with pytest.raises(UsageError, match=r"toy.zip has the md5 .* remove it and fetch it again"):
        locate(source, DataOptions(data_dir=home, download=True))


def test_what_cannot_be_reached_is_one_sentence(served: Path, home: Path) -> None:
    source = describe(served / "gone.bin", "toy/data.bin")
    with pytest.raises(UsageError, match=r"gone.bin cannot be fetched \(.*\); fetch it elsewhere"):
        locate(source, DataOptions(data_dir=home, download=True))


def test_a_place_that_cannot_be_written_to_is_one_sentence(served: Path, home: Path) -> None:
    (home / "file").touch()
    source = describe(served / "data.bin", "toy/data.bin")
    with pytest.raises(UsageError, match=r"data_dir is '.*file'; it must be a folder to write to"):
        locate(source, DataOptions(data_dir=home / "file", download=True))


def test_an_archive_cannot_write_outside(served: Path, home: Path) -> None:
    tar_of(served / "toy.tar.gz", "../evil.bin")
    source = describe(served / "toy.tar.gz", "toy.tar.gz", unpack=True)
    with pytest.raises(UsageError, match="damaged or of another kind; it is not an archive"):
        locate(source, DataOptions(data_dir=home, download=True))
    assert not (home.parent / "evil.bin").exists()


def test_the_workers_of_a_job_fetch_once(
    served: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (served / "data.bin").write_bytes(CONTENT)
    source = describe(served / "data.bin", "toy/data.bin")
    fetched: list[str] = []
    plain = OpenerDirector.open

    def counted(self: OpenerDirector, request: Request, *rest: Any, **options: Any) -> Any:
        fetched.append(request.full_url)
        return plain(self, request, *rest, **options)

    monkeypatch.setattr(OpenerDirector, "open", counted)
    options = DataOptions(data_dir=home, download=True)
    workers = [threading.Thread(target=locate, args=(source, options)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(fetched) == 1


# -- nobody gets in ----------------------------------------------------------------------------------------------


def test_only_https_is_fetched_and_a_redirection_stays_there(home: Path) -> None:
    remote = Remote(url="http://example.org/data.bin", path="toy/data.bin", checksum="md5:0")
    with pytest.raises(UsageError, match="cannot be fetched; only https"):
        download.fetch(remote, home)
    for away in ("http://example.org/x", "ftp://example.org/x", "file:///etc/passwd"):
        with pytest.raises(UsageError, match="only https"):
            download.SafeRedirects().redirect_request(None, None, 302, "", {}, away)


@pytest.mark.parametrize("header", ["many", "-1", "1" * 5, "0x10", ""])
def test_a_malformed_header_is_not_believed(header: str, home: Path) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(
                f"HTTP/1.0 200 OK\r\nContent-Length: {header}\r\n\r\n".encode() + CONTENT
            )

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/data.bin"
        digest = hashlib.sha256(CONTENT).hexdigest()
        remote = Remote(url=url, path="toy/data.bin", checksum=f"sha256:{digest}")
        try:
            download.fetch(remote, home, schemes=("http",))
        except UsageError as error:
            # More was promised than came.
            assert "cannot be fetched (IncompleteRead" in str(error)
            assert list((home / "toy").iterdir()) == []
        else:
            assert (home / "toy" / "data.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("new_python", [True, False])
@pytest.mark.parametrize("evil", ["../evil.bin", "/evil.bin", "link", "device"])
def test_no_python_unpacks_what_is_evil(
    new_python: bool, evil: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not new_python:
        monkeypatch.delattr(tarfile, "data_filter")
    with tarfile.open(home / "toy.tar", "w") as archive:
        info = tarfile.TarInfo(evil)
        info.type = {"link": tarfile.SYMTYPE, "device": tarfile.CHRTYPE}.get(evil, tarfile.REGTYPE)
        info.linkname = "/etc/passwd" if evil == "link" else ""
        archive.addfile(info, io.BytesIO(b""))
    try:
        download.unpack(home / "toy.tar", home)
    except UsageError as error:
        assert "damaged or of another kind; it is not an archive" in str(error)
    else:
        # Python's own filter takes the slash away.
        assert new_python and evil == "/evil.bin"
    assert not Path("/evil.bin").exists() and not (home.parent / "evil.bin").exists()
    assert not (home / "link").is_symlink() and not (home / "device").exists()


def test_an_old_python_unpacks_what_is_plain(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    tar_of(home / "toy.tar.gz", "toy/data.bin")
    download.unpack(home / "toy.tar.gz", home)
    assert (home / "toy" / "data.bin").read_bytes() == CONTENT


def test_the_lock_follows_no_link(home: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(CONTENT)
    (home / ".thinwire-download").symlink_to(victim)
    with pytest.raises(UsageError, match="must be a folder to write to"), download.lock(home):
        pass
    assert victim.read_bytes() == CONTENT
