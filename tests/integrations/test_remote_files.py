"""`open`, `load`, `inspect` and `verify` of files at URLs: ranges are read, each once."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import rewritten

import fastserial
from fastserial import reports
from fastserial.errors import (
    ConfigError,
    ConvertError,
    CorruptCheckpointError,
    RemoteError,
    UnmetOptionWarning,
    UnreadableCheckpointError,
)
from fastserial.files import remote

STATE: dict[str, Any] = {
    "weight": torch.arange(3 << 20, dtype=torch.float64).reshape(3, 1 << 20),
    **{f"small.{index}": torch.full((1000,), index) for index in range(50)},
    "step": 7,
}


@pytest.fixture(params=["fsspec", "obstore"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder; the files are in `tmp_path`."""
    pytest.importorskip(request.param)
    if request.param == "fsspec":
        monkeypatch.setattr(remote, "_OBSTORE_SCHEMES", set())
    torch.save(STATE, tmp_path / "x.pt")
    return f"file://{tmp_path}"


class Reads(list[tuple[int, int]]):
    """The ranges that were read; something may happen before one of them."""

    number = 0
    do: Callable[[], object]

    def at(self, number: int, do: Callable[[], object]) -> None:
        """Do something before the read of this number, which counts from 1."""
        self.clear()
        self.number, self.do = number, do


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()
    for kind in (remote._ObstoreFolder, remote._FsspecFolder):
        real = kind.read

        def note(self: Any, name: str, at: int, nbytes: int, real: Any = real) -> Any:
            reads.append((at, nbytes))
            if len(reads) == reads.number:
                reads.do()
            return real(self, name, at, nbytes)

        monkeypatch.setattr(kind, "read", note)
    return reads


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is read at once."""
    monkeypatch.setattr(remote, "_CHUNK", 1 << 20)


def test_tensors_and_parts_of_them(bucket: str, read: Reads) -> None:
    with fastserial.open(f"{bucket}/x.pt") as file:
        assert torch.equal(file.get_tensor("small.3"), STATE["small.3"])
        rows = file.get_slice("weight")[1:2, :100]
        assert torch.equal(rows, STATE["weight"][1:2, :100])
        assert sum(nbytes for _, nbytes in read) < 1 << 20
        assert torch.equal(file.get_tensor("weight"), STATE["weight"])
        assert max(nbytes for _, nbytes in read) <= 8 << 20


def test_a_load_reads_each_byte_once(
    bucket: str, tmp_path: Path, read: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_unmet", set())  # it warns once in a process
    found = fastserial.load(f"{bucket}/x.pt", weights_only=True)
    assert found["step"] == 7
    assert all(torch.equal(found[name], STATE[name]) for name in STATE if name != "step")
    assert sum(nbytes for _, nbytes in read) <= (tmp_path / "x.pt").stat().st_size
    with pytest.raises(ConfigError, match=r"fastserial\.verify"):
        fastserial.load(f"{bucket}/x.pt", verify=True)
    with fastserial.options(verify_on_load=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fastserial.load(f"{bucket}/x.pt")
    assert UnmetOptionWarning in [one.category for one in caught]


@pytest.mark.usefixtures("little")
def test_a_file_that_is_replaced_meanwhile(bucket: str, tmp_path: Path, read: Reads) -> None:
    new = {key: value + 1 for key, value in STATE.items()}

    def replace() -> None:
        (tmp_path / "new").mkdir(exist_ok=True)
        torch.save(new, tmp_path / "new" / "x.pt")
        assert (tmp_path / "new" / "x.pt").stat().st_size == (tmp_path / "x.pt").stat().st_size
        os.replace(tmp_path / "new" / "x.pt", tmp_path / "x.pt")

    read.at(12, replace)
    with pytest.raises(CorruptCheckpointError, match="changed while it was read"):
        fastserial.load(f"{bucket}/x.pt")
    read.at(12, replace)
    report = fastserial.verify(f"{bucket}/x.pt")
    assert report.status == "unreadable"
    assert "changed while it was read" in report.notes[-1]
    with fastserial.open(f"{bucket}/x.pt") as file:
        file.get_tensor("weight")
        replace()
        with pytest.raises(CorruptCheckpointError, match="changed while it was read"):
            file.get_tensor("weight")


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("error", [RemoteError("down"), KeyboardInterrupt()], ids=["down", "ctrl"])
def test_an_error_in_the_middle_of_a_load(bucket: str, error: BaseException, read: Reads) -> None:
    def fail() -> None:
        raise error

    read.at(12, fail)
    with pytest.raises(type(error)) as caught:
        fastserial.load(f"{bucket}/x.pt")
    assert caught.value is error


@pytest.mark.usefixtures("little")
def test_few_parts_are_kept(bucket: str, tmp_path: Path) -> None:
    data = (tmp_path / "x.pt").read_bytes()
    file = remote.ReadAhead(remote.RemoteSource(f"{bucket}/x.pt"))
    for at in [*reversed(range(0, len(data), 1 << 20)), 5 << 20, 0]:
        file.seek(at)
        assert file.read(100) == data[at : at + 100]
        assert len(file._parts) <= 9
    file.close()


def test_inspect_and_verify(bucket: str, tmp_path: Path, read: Reads) -> None:
    here, there = fastserial.inspect(tmp_path / "x.pt"), fastserial.inspect(f"{bucket}/x.pt")
    assert there.tensors == here.tensors
    assert there.storages == here.storages
    read.clear()
    report = fastserial.verify(f"{bucket}/x.pt")
    assert report.ok, report
    assert report.checked_bytes == fastserial.verify(tmp_path / "x.pt").checked_bytes
    assert len(read) < 20
    with (tmp_path / "x.pt").open("r+b") as file:
        file.seek(9 << 20)
        file.write(b"\xff")
    (problem,) = fastserial.verify(f"{bucket}/x.pt").problems
    assert "damaged" in problem.message


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.usefixtures("little")
def test_verify_of_the_archive_of_another_program(
    bucket: str, tmp_path: Path, read: Reads, method: int
) -> None:
    """Each byte is read once, and what fails on the way is no damage."""
    data = rewritten((tmp_path / "x.pt").read_bytes(), compression=method, compresslevel=1)
    (tmp_path / "others.pt").write_bytes(data)
    url = f"{bucket}/others.pt"
    threads = threading.active_count()
    assert fastserial.verify(url).ok
    assert sum(nbytes for _, nbytes in read) < 1.2 * len(data)
    assert len(read) < 1.5 * len(STATE) + 24  # one for each record's header
    while threading.active_count() > threads:  # those of the read-ahead end
        time.sleep(0.01)

    def fail() -> None:
        raise RemoteError("down")

    total = len(read)
    for number in (1, total // 2, total - 5, total - 2):
        read.at(number, fail)
        report = fastserial.verify(url)
        assert (report.status, report.notes[-1]) == ("unreadable", "down"), number


def test_safetensors(bucket: str, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a": STATE["weight"]}, tmp_path / "x.safetensors")
    url = f"{bucket}/x.safetensors"
    with fastserial.open(url) as file:
        assert torch.equal(file.get_tensor("a"), STATE["weight"])
    assert fastserial.verify(url).ok
    assert fastserial.inspect(url).format == "safetensors"
    assert torch.equal(fastserial.load(url)["a"], STATE["weight"])
    assert fastserial.load(url, map_location="meta")["a"].is_meta
    with pytest.raises(UnreadableCheckpointError, match=r"fastserial\.open"):
        fastserial.load(url, map_location={"cuda:0": "cpu"})


def test_what_is_not_there(bucket: str, tmp_path: Path) -> None:
    for name in ("y.pt", "folder/y.pt"):
        for call in (fastserial.open, fastserial.load, fastserial.inspect):
            with pytest.raises(FileNotFoundError, match=name) as caught:
                call(f"{bucket}/{name}")
            assert caught.value.filename == f"{bucket}/{name}"
        report = fastserial.verify(f"{bucket}/{name}")
        assert report.notes == ["No such file or directory"]
    assert not (tmp_path / "folder").exists()
    (tmp_path / "text").write_text("no checkpoint")
    with pytest.raises(UnreadableCheckpointError):
        fastserial.open(f"{bucket}/text")


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setattr(remote, "_TIMEOUT", 0.5)
    monkeypatch.setattr(remote, "_ONE_CALL", 0.1)  # Ctrl-C waits for one call, no longer
    asked: list[int] = []
    real = remote._ObstoreFolder.status
    monkeypatch.setattr(
        remote._ObstoreFolder, "status", lambda *args: asked.append(1) or real(*args)
    )
    with pytest.raises(RemoteError):
        fastserial.inspect("s3://bucket/x.pt")
    assert len(asked) > 1


@contextlib.contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of an HTTP server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_connection_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived is kept, and only the rest is asked for again."""
    pytest.importorskip("obstore")
    data = os.urandom(3_500_000)
    asked: list[int] = []

    class Cut(http.server.BaseHTTPRequestHandler):
        def answer(self, code: int, nbytes: int) -> None:
            self.send_response(code)
            headers = {"ETag": '"x"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
            for name, value in {"Content-Length": str(nbytes), **headers}.items():
                self.send_header(name, value)

        def do_HEAD(self) -> None:
            self.answer(200, len(data))
            self.end_headers()

        def do_GET(self) -> None:
            start, last = map(int, self.headers["Range"].split("=")[1].split("-"))
            asked.append(start)
            self.answer(206, last + 1 - start)
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(data)}")
            self.end_headers()
            self.wfile.write(data[start : min(start + 1_000_000, last + 1)])

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(remote, "_ONE_CALL", 0.0)  # obstore does not try again
    monkeypatch.setattr(remote, "_TIMEOUT", 0.0)
    with serving(Cut) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        source = remote.RemoteSource("s3://bucket/x.pt")
        assert source.read_at(0, len(data)) == data
    assert asked == sorted(asked)
    assert 2 < len(asked) < 6


def test_a_server_that_ignores_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole file is never taken for a part of it, nor asked for again."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "_ONE_CALL", 0.0)
    asked: list[str] = []
    real = remote._FsspecFolder.status
    monkeypatch.setattr(
        remote._FsspecFolder, "status", lambda *args: asked.append(args[1]) or real(*args)
    )
    torch.save(STATE, tmp_path / "x.pt")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with serving(handler) as address:
        url = f"{address}/x.pt"
        for call in (fastserial.open, fastserial.load, fastserial.inspect):
            with pytest.raises(RemoteError, match=rf"^{url}: .*Range.*: download it"):
                call(url)
        assert fastserial.verify(url).status == "unreadable"
    assert len(asked) == 4


@pytest.mark.parametrize("url", ["unknown://x/y.pt", "s3://bucketonly", "s3://bucket/folder/"])
def test_urls_that_cannot_be_opened(url: str) -> None:
    for call in (fastserial.open, fastserial.load, fastserial.inspect):
        with pytest.raises(ConfigError, match=url.split("/")[2]):
            call(url)
    assert fastserial.verify(url).status == "unreadable"


def test_a_url_without_a_folder() -> None:
    files = pytest.importorskip("fsspec").filesystem("memory")
    with files.open("/alone.pt", "wb") as file:
        torch.save({"a": 1}, file)
    assert fastserial.load("memory://alone.pt") == {"a": 1}


def test_what_urls_do_not_take(bucket: str, tmp_path: Path) -> None:
    report = fastserial.verify(f"{bucket}/x.pt", cold=True)
    assert report.ok
    assert report.seconds > 0
    assert "cold" in report.notes[0]
    with pytest.raises(ConvertError, match="download or upload it"):
        fastserial.convert(f"{bucket}/x.pt", tmp_path / "x.safetensors")


def test_a_forked_process_cannot_read_what_its_parent_opened(bucket: str) -> None:
    """It would wait forever for threads that it does not have."""
    with fastserial.open(f"{bucket}/x.pt") as file:
        assert torch.equal(file.get_tensor("small.3"), STATE["small.3"])
        child = os.fork()
        if not child:
            try:
                file.get_tensor("small.4")
            except ConfigError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
