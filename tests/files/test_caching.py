"""What loads and saves leave in the page cache, and who decides."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import MIB, noise
from support.identity import digest, fast, stock

import fastserial
from fastserial.errors import WriteError
from fastserial.files import linux
from fastserial.files.linux import cached_fraction
from fastserial.reports import last_load_report

SMALL = {"small_file": 0, "block_size": 256 * 1024}


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device was measured, and a trial takes few bytes."""
    monkeypatch.setattr(linux, "_speeds", {})
    monkeypatch.setattr(linux, "TRIAL", MIB)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is not in the page cache, on a device that has refused nothing."""
    monkeypatch.setattr(linux, "_refusing", set())
    file = tmp_path / "f.pt"
    with stock():
        torch.save([noise(3 * MIB), noise(5 * MIB)], file)
    chill(file)
    return file


@pytest.fixture
def direct(tmp_path: Path, unmeasured: None) -> Path:
    """A folder on an unmeasured device that takes direct I/O."""
    if not saved(tmp_path / "direct.pt", direct=True).direct:
        pytest.skip("no direct I/O here")
    linux._speeds.clear()
    return tmp_path


def verdicts() -> list[bool]:
    """What was found out of devices, in this order."""
    return [fast for fast, _ in linux._speeds.values()]


def chill(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path) > 0.1:
        pytest.skip("the file system keeps its files in the page cache, or does not tell")


def cached(path: Path) -> float:
    with path.open("rb") as file:
        found = cached_fraction(file.fileno(), 0, path.stat().st_size)
    return 1.0 if found is None else found


def loaded(path: Path, **options: Any) -> tuple[int, int]:
    """Load, and return how many bytes came directly and through the page cache."""
    with fast(**SMALL, **options):
        torch.load(path)
        report = last_load_report()
    assert report is not None
    assert report.engine == "threads"
    return report.direct_bytes, report.cached_bytes


@pytest.mark.parametrize("cache", ["auto", "keep"])
def test_a_load_leaves_the_file_for_others(path: Path, cache: str) -> None:
    direct, through = loaded(path, cache=cache)
    assert direct == 0 < through
    assert cached(path) > 0.99


def test_a_load_leaves_nothing_if_told_so(path: Path) -> None:
    direct, _ = loaded(path, cache="drop")
    if not direct:
        pytest.skip("no direct I/O here")
    assert cached(path) < 0.1


def test_a_file_larger_than_memory_is_read_directly(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "ALWAYS_FITS", 0)
    monkeypatch.setattr(linux, "available_bytes", lambda: 4 * MIB)
    direct, _ = loaded(path)
    assert direct or not has_direct(path.parent)
    monkeypatch.setattr(linux, "available_bytes", lambda: None)
    assert loaded(path)[0] == 0


def has_direct(folder: Path) -> bool:
    return saved(folder / "direct.pt", direct=True).direct


def saved(path: Path, state: object = None, **options: Any) -> fastserial.SaveReport:
    with fast(**SMALL, **options):
        torch.save(state or [noise(3 * MIB), noise(5 * MIB)], path)
        report = fastserial.last_save_report()
    assert report is not None
    return report


@pytest.mark.parametrize("durable", [True, False])
def test_on_a_slow_device_a_save_leaves_the_file_for_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None, durable: bool
) -> None:
    monkeypatch.setattr(linux, "FAST_DEVICE", float("inf"))
    for name in ("first.pt", "second.pt"):  # the second relies on what the first measured
        report = saved(tmp_path / name, durable=durable)
        assert not report.direct
        assert report.fallback is None
        assert cached(tmp_path / name) > 0.99
    assert verdicts() == [False]


def test_on_a_fast_device_a_save_is_direct(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "FAST_DEVICE", 0.0)
    state = [noise(3 * MIB), noise(5 * MIB)]
    assert saved(direct / "first.pt", state).direct
    assert 0.05 < cached(direct / "first.pt") < 0.5  # the trial
    assert saved(direct / "second.pt").direct
    assert cached(direct / "second.pt") < 0.1
    with stock():
        assert digest(torch.load(direct / "first.pt")) == digest(state)


def test_saves_do_as_told(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "FAST_DEVICE", float("inf"))
    assert saved(direct / "drop.pt", cache="drop").direct
    assert cached(direct / "drop.pt") < 0.1
    assert saved(direct / "direct.pt", direct=True).direct
    monkeypatch.setattr(linux, "FAST_DEVICE", 0.0)
    assert not saved(direct / "keep.pt", cache="keep").direct
    assert cached(direct / "keep.pt") > 0.99


@pytest.mark.parametrize("cache", ["auto", "keep"])
def test_a_device_that_fails_while_it_is_written_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None, cache: str
) -> None:
    """The error is told once: the sync at the end may not see it again."""
    target = tmp_path / "f.pt"
    target.write_bytes(b"old")

    def failing(*_: object) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(linux, "_sync_file_range", failing)
    with fast(**SMALL, cache=cache), pytest.raises(WriteError) as caught:
        torch.save([noise(3 * MIB), noise(5 * MIB)], target)
    assert caught.value.errno == errno.EIO
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f.pt"]


# --- memory -------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(linux, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(linux, "_CGROUPS", tmp_path)
    monkeypatch.setattr(linux, "meminfo", lambda: {"MemAvailable": 1 << 40})
    return tmp_path


def limit(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"memory.{name}").write_text(text)


def test_the_narrowest_group_counts(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/job/step\n")
    limit(groups / "job", max="1000\n", current="900\n", stat="active_file 50\ninactive_file 7\n")
    limit(groups / "job" / "step", max="max\n", current="900\n", stat="")
    assert linux.available_bytes() == 157


def test_groups_of_version_1(groups: Path) -> None:
    (groups / "cgroup").write_text("9:cpu,cpuacct:/other\n4:memory:/docker/of/the/host\n0::/\n")
    stat = "active_file 1\ntotal_active_file 50\ntotal_inactive_file 7\n"
    inside = groups / "memory"
    limit(inside, limit_in_bytes=f"{(1 << 63) - 4096}\n", usage_in_bytes="900\n", stat=stat)
    assert linux.available_bytes() == 1 << 40
    limit(inside, limit_in_bytes="1000\n")
    assert linux.available_bytes() == 157


def test_groups_that_are_not_there(groups: Path) -> None:
    assert linux.available_bytes() == 1 << 40
    (groups / "cgroup").write_text("0::/of/the/host\n")
    assert linux.available_bytes() == 1 << 40
