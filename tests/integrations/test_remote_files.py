"""`open`, `load`, `inspect` and `verify` of files at URLs: ranges are read, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial
from fastserial.errors import ConfigError, RemoteError, UnreadableCheckpointError
from fastserial.files import remote

STATE = {
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


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that were read."""
    ranges: list[tuple[int, int]] = []
    for kind in (remote._ObstoreFolder, remote._FsspecFolder):
        real = kind.read

        def note(self: Any, name: str, at: int, nbytes: int, real: Any = real) -> Any:
            ranges.append((at, nbytes))
            return real(self, name, at, nbytes)

        monkeypatch.setattr(kind, "read", note)
    return ranges


def test_tensors_and_parts_of_them(bucket: str, read: list[tuple[int, int]]) -> None:
    with fastserial.open(f"{bucket}/x.pt") as file:
        assert torch.equal(file.get_tensor("small.3"), STATE["small.3"])
        rows = file.get_slice("weight")[1:2, :100]
        assert torch.equal(rows, STATE["weight"][1:2, :100])
        assert sum(nbytes for _, nbytes in read) < 1 << 20
        assert torch.equal(file.get_tensor("weight"), STATE["weight"])
        assert max(nbytes for _, nbytes in read) <= 8 << 20


def test_a_load_reads_each_byte_once(
    bucket: str, tmp_path: Path, read: list[tuple[int, int]]
) -> None:
    found = fastserial.load(f"{bucket}/x.pt", weights_only=True)
    assert found["step"] == 7
    assert all(torch.equal(found[name], STATE[name]) for name in STATE if name != "step")
    assert sum(nbytes for _, nbytes in read) <= (tmp_path / "x.pt").stat().st_size
    with pytest.raises(ConfigError, match=r"fastserial\.verify"):
        fastserial.load(f"{bucket}/x.pt", verify=True)


def test_inspect_and_verify(bucket: str, tmp_path: Path, read: list[tuple[int, int]]) -> None:
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


def test_safetensors(bucket: str, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a": STATE["weight"]}, tmp_path / "x.safetensors")
    url = f"{bucket}/x.safetensors"
    with fastserial.open(url) as file:
        assert torch.equal(file.get_tensor("a"), STATE["weight"])
    assert fastserial.verify(url).ok
    assert fastserial.inspect(url).format == "safetensors"


def test_what_is_not_there(bucket: str, tmp_path: Path) -> None:
    for call in (fastserial.open, fastserial.load, fastserial.inspect):
        with pytest.raises(FileNotFoundError):
            call(f"{bucket}/y.pt")
    assert not fastserial.verify(f"{bucket}/y.pt").ok
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
    with pytest.raises(RemoteError):
        fastserial.inspect("s3://bucket/x.pt")
