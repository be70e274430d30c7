"""Damaged, hostile and changing files through torch.load: an error or the right value."""

from __future__ import annotations

import ctypes
import io
import os
import random
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import appended, hostile, state, unusual
from support.corpus import FORMATS, noise, without_crc
from support.damage import damaged
from support.identity import digest, fast, saved, stock, stock_bytes
from support.loading import FORCED, Outcome, attempt, both, last_report

import fastserial
from fastserial import reports
from fastserial.errors import (
    CorruptCheckpointError,
    EngineUnavailableError,
    UnmetOptionWarning,
)
from fastserial.formats.source import BytesSource
from fastserial.formats.zip_format import read_directory
from fastserial.loading import prefetch

DIRECT, VERIFIED = FORCED["direct"], FORCED["verified"]
pytestmark = pytest.mark.usefixtures("all_forced")


def checkpoint(fmt: str = "zip") -> bytes:
    return stock_bytes({**state(), "n": "text"}, fmt)


def places(data: bytes) -> dict[str, tuple[int, int]]:
    """Per record: start and end of its data."""
    records = read_directory(BytesSource(data)).records
    return {record.name: (record.data_offset, record.data_end) for record in records}


_M_PERTURB = -6  # of mallopt(3): new memory is filled with the complement of this byte


def _poisoned(path: Path, fill: int) -> Any:
    """Load where new memory is filled, and freed memory holds `fill` where it is used again."""
    for size in (20_000, 9000, 300):
        junk = [torch.full((size,), fill, dtype=torch.uint8) for _ in range(8)]
        del junk
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_PERTURB, fill)
    try:
        return torch.load(path)
    finally:
        mallopt(_M_PERTURB, 0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_random_damage(fmt: str, tmp_path: Path) -> None:
    """Without checks: stock's value, or an error where stock has one. With: no wrong value."""
    data = checkpoint(fmt)
    path = tmp_path / "f.pt"
    path.write_bytes(data)
    with stock():
        right = digest(torch.load(path))
    counts = {"equal": 0, "error": 0}
    for seed in range(80):
        path.write_bytes(damaged({fmt: data}, random.Random(seed)).data)
        with fast():
            with fastserial.options(**DIRECT):
                got = attempt(lambda: torch.load(path))
            with fastserial.options(**VERIFIED):
                checked = attempt(lambda: torch.load(path))
        counts["error" if got.error else "equal"] += 1
        if fmt == "zip":
            assert checked.error or digest(checked.value) == right, seed
        _as_stock(path, got)
    assert min(counts.values()) > 8, counts


def _as_stock(path: Path, got: Outcome) -> None:
    """Fail unless a load without checks did what stock does: the same value, or its kind of error.

    Values are not compared where stock gives memory that nobody wrote to, as it does for a record
    that looks like a directory.
    """
    with stock():
        want = attempt(lambda: _poisoned(path, 85))
        again = attempt(lambda: _poisoned(path, 170))
    assert (want.error is None) == (got.error is None), (want.error, got.error)
    assert isinstance(got.error, type(want.error)), (want.error, got.error)
    if want.error is None and digest(want.value) == digest(again.value):
        assert digest(want.value) == digest(got.value)


def _no_engine(threads: int) -> Any:
    raise EngineUnavailableError("no such engine here")


TORCH_READS = {**VERIFIED, "engine": _no_engine}


def test_every_record_is_verified(tmp_path: Path) -> None:
    """Also where torch reads, as no engine does."""
    ways = (VERIFIED, {"verify_on_load": True}, {**DIRECT, "verify_on_load": True}, TORCH_READS)
    data = checkpoint()
    path = tmp_path / "f.pt"
    for name, (start, end) in places(data).items():
        read = name.startswith("data/") or name in ("data.pkl", "byteorder")
        if not read or start == end:
            continue
        for at in {start, (start + end) // 2, end - 1}:
            broken = bytearray(data)
            broken[at] ^= 0x10
            path.write_bytes(broken)
            for options in ways:
                with fast(**options), pytest.raises(CorruptCheckpointError) as caught:
                    torch.load(path)
                assert caught.value.record == name
                assert str(path) in str(caught.value)
                assert name in str(caught.value)


def test_undamaged_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_unmet", set())
    path = tmp_path / "f.pt"
    path.write_bytes(checkpoint())
    with fast(verify_on_load=True):
        torch.load(path)
    assert last_report().verified
    with fast(**TORCH_READS):
        torch.load(path)
    report = last_report()
    assert (report.verified, report.engine, report.bytes) == (True, "torch", 0)
    assert report.fallback
    with stock(), without_crc():
        torch.save([noise(9000)], path)
    with fast(**VERIFIED), pytest.warns(UnmetOptionWarning, match="without checksums"):
        torch.load(path)
    assert not last_report().verified


# --- hostile zips -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hostile())
@pytest.mark.parametrize("options", [DIRECT, VERIFIED, {}], ids=["forced", "verified", "default"])
def test_hostile_zips(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """An error that stock's callers catch, and no memory that the file does not justify."""
    path = tmp_path / "f.pt"
    path.write_bytes(hostile()[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fast(**options):
        got = attempt(lambda: torch.load(path))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 64 * 1024 * 1024
    if options.get("verify_on_load") and got.error is not None:
        assert isinstance(got.error, RuntimeError)
    else:
        _as_stock(path, got)


@pytest.mark.parametrize("name", unusual())
@pytest.mark.parametrize("options", [DIRECT, {}], ids=["forced", "default"])
def test_what_only_torch_can_read_is_read_by_torch(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(unusual()[name])
    want = both(lambda: torch.load(path), options)
    assert want.error is None
    assert digest(want.value) == digest(state())


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("apart", [True, False])
def test_a_record_that_is_there_twice(
    damaged: int, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one name and checksum, and one of them damaged: stock's choice, or an error."""
    if apart:
        monkeypatch.setattr(prefetch, "READ_TOGETHER", 1)
    value = noise(30_000)
    with zipfile.ZipFile(io.BytesIO(stock_bytes([value]))) as file:
        body = file.read("archive/data/0")
    path = tmp_path / "f.pt"
    data = bytearray(appended(stock_bytes([value]), ("archive/data/0", body, zipfile.ZIP_STORED)))
    records = read_directory(BytesSource(data)).records
    at = [record.data_offset for record in records if record.name == "data/0"][damaged]
    assert data[at : at + 30_000] == body
    data[at + 3] ^= 0xFF
    path.write_bytes(data)
    want = both(lambda: torch.load(path), DIRECT, {})
    assert want.error is None
    with fast(**VERIFIED):
        got = attempt(lambda: torch.load(path))
    assert isinstance(got.error, CorruptCheckpointError) or digest(got.value) == digest([value])
    assert (got.error is None) == (digest(want.value) == digest([value]))


# --- files that change --------------------------------------------------------------------------


def _written_over(data: bytes) -> bytes:
    """Another checkpoint with the same tensors, of the same size, with other values."""
    with stock():
        return stock_bytes([value ^ 0x55 for value in torch.load(io.BytesIO(data))])


@pytest.mark.parametrize("how", ["truncate", "overwrite", "append"])
def test_file_changes_while_read(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "LOOK_AHEAD", 100_000)
    path = saved(tmp_path, [noise(90_000) for _ in range(20)], name="archive.pt")
    data = path.read_bytes()
    other = _written_over(data)
    assert len(other) == len(data)
    os.utime(path, (1, 1))
    calls: list[int] = []

    def change(storage: Any, location: str) -> Any:
        calls.append(1)
        if len(calls) == 3:
            size = path.stat().st_size
            with open(path, "r+b") as file:
                if how == "truncate":
                    file.truncate(size // 2)
                elif how == "append":
                    file.seek(size)
                    file.write(b"more")
                else:
                    file.write(other)
        return storage

    with fast(**{**DIRECT, "queue_depth": 1, "threads": 1}), pytest.raises(RuntimeError) as caught:
        torch.load(path, map_location=change)
    assert isinstance(caught.value, CorruptCheckpointError), caught.value
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("options", [DIRECT, VERIFIED], ids=["direct", "verified"])
def test_touched_file_is_the_same_file(options: dict[str, Any], tmp_path: Path) -> None:
    """Somebody keeps files in scratch folders young; or the file system's clock is the time now."""
    values = [noise(90_000) for _ in range(20)]
    path = saved(tmp_path, values)
    times: list[int] = []

    def touch(storage: Any, location: str) -> Any:
        times.append(len(times))
        os.utime(path, (len(times), len(times)))
        return storage

    with fast(**options):
        found = torch.load(path, map_location=touch)
    assert len(times) == 20
    assert digest(found) == digest(values)
    report = last_report()
    assert (report.engine, report.fallback) == ("threads", None)
