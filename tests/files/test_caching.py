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
from fastserial.engines import Completion, Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.errors import WriteError
from fastserial.files import caching, linux
from fastserial.files.caching import cached_fraction
from fastserial.reports import last_load_report

SMALL = {"small_file": 0, "block_size": 256 * 1024}


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device was measured, and a trial takes few bytes."""
    monkeypatch.setattr(caching, "_speeds", {})
    monkeypatch.setattr(caching, "TRIAL", MIB)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is not in the page cache."""
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
    caching._speeds.clear()
    return tmp_path


def verdicts() -> list[bool]:
    """What was found out of devices, in this order."""
    return [found.fast for found in caching._speeds.values()]


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
    monkeypatch.setattr(caching, "ALWAYS_FITS", 0)
    monkeypatch.setattr(caching, "available_bytes", lambda: 4 * MIB)
    direct, _ = loaded(path)
    assert direct or not has_direct(path.parent)
    monkeypatch.setattr(caching, "available_bytes", lambda: None)
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
    monkeypatch.setattr(caching, "FAST_DEVICE", float("inf"))
    for name in ("first.pt", "second.pt"):  # the second relies on what the first measured
        report = saved(tmp_path / name, durable=durable)
        assert not report.direct
        assert report.fallback is None
        assert cached(tmp_path / name) > 0.99
    assert verdicts() == [False]


def test_a_device_that_was_busy_is_measured_again(
    direct: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "FAST_DEVICE", float("inf"))
    assert not saved(direct / "busy.pt").direct
    monkeypatch.setattr(caching, "FAST_DEVICE", 0.0)
    assert not saved(direct / "soon.pt").direct
    monkeypatch.setattr(caching, "SLOW_FOR", 0.0)
    assert saved(direct / "later.pt").direct  # but for the beginning
    assert verdicts() == [True]


def test_a_device_that_was_fast_is_measured_again(
    direct: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have used up what a cloud lends it for a while."""
    monkeypatch.setattr(caching, "FAST_DEVICE", 0.0)
    assert saved(direct / "fast.pt").direct
    monkeypatch.setattr(caching, "FAST_DEVICE", float("inf"))
    assert saved(direct / "soon.pt").direct
    assert verdicts() == [True]
    monkeypatch.setattr(caching, "FAST_FOR", 0.0)
    assert not saved(direct / "later.pt").direct
    assert cached(direct / "later.pt") > 0.99
    assert verdicts() == [False]


@pytest.mark.parametrize("speed", [0.0, float("inf")])
def test_a_device_is_fast_as_long_as_direct_saves_are(
    direct: Path, monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    """No save has to be on trial for that; one that is slow says nothing, it may have waited."""
    monkeypatch.setattr(caching, "FAST_DEVICE", 0.0)
    assert saved(direct / "fast.pt").direct
    (key, known), *_ = caching._speeds.items()
    monkeypatch.setattr(caching, "FAST_DEVICE", speed)
    assert saved(direct / "soon.pt").direct
    assert saved(direct / "short.pt", [noise(MIB // 2)]).direct
    assert verdicts() == [True]
    assert (caching._speeds[key].at > known.at) is (speed == 0.0)


def test_little_is_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    """A throttle or a disk's cache takes that much at once."""
    monkeypatch.setattr(caching, "FAST_DEVICE", 0.0)
    assert not saved(tmp_path / "short.pt", [noise(MIB // 2)]).direct
    assert not verdicts()


def test_where_a_sandbox_refuses_the_call_saves_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    def refused(*args: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(caching, "_sync_file_range", refused)
    assert not saved(tmp_path / "f.pt").direct
    assert not verdicts()
    torch.load(tmp_path / "f.pt")


def test_a_trial_on_a_file_whose_writes_wait_times_the_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    """With O_DSYNC nothing is left to wait for at the end of the trial."""
    if not has_direct(tmp_path) or not os.major(tmp_path.stat().st_dev):
        pytest.skip("no direct I/O here, or no block device")
    clock = iter(range(1000))  # a second for each look at the clock
    monkeypatch.setattr(caching, "perf_counter", lambda: next(clock))
    took: list[int] = []
    for flags in (0, os.O_DSYNC):
        caching._speeds.clear()
        monkeypatch.setattr(caching, "FAST_DEVICE", 1.5 * MIB)  # for one second fast, for two slow
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | flags)
        try:
            trial = caching.Timing(fd)
            trial.take(0, 2 * MIB)
            took.append(trial.judge())
        finally:
            os.close(fd)
    assert took == [True, False]


def test_on_a_fast_device_a_save_is_direct(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "FAST_DEVICE", 0.0)
    state = [noise(3 * MIB), noise(5 * MIB)]
    assert saved(direct / "first.pt", state).direct
    assert 0.05 < cached(direct / "first.pt") < 0.5  # the trial
    assert saved(direct / "second.pt").direct
    assert cached(direct / "second.pt") < 0.1
    with stock():
        assert digest(torch.load(direct / "first.pt")) == digest(state)


def test_saves_do_as_told(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "FAST_DEVICE", float("inf"))
    assert saved(direct / "drop.pt", cache="drop").direct
    assert cached(direct / "drop.pt") < 0.1
    assert saved(direct / "direct.pt", direct=True).direct
    monkeypatch.setattr(caching, "FAST_DEVICE", 0.0)
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

    monkeypatch.setattr(caching, "_sync_file_range", failing)
    with fast(**SMALL, cache=cache), pytest.raises(WriteError) as caught:
        torch.save([noise(3 * MIB), noise(5 * MIB)], target)
    assert caught.value.errno == errno.EIO
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f.pt"]


def test_without_the_call_saves_go_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    monkeypatch.setattr(caching, "_sync_file_range", None)
    assert not saved(tmp_path / "f.pt").direct


class FailsLater(ThreadsEngine):
    """Reads a few blocks, and then no more."""

    served = 0

    def _serve(self, request: Request) -> Completion:
        self.served += 1
        if self.served > 2:
            return Completion(request, 0, OSError(errno.EIO, "Input/output error"))
        return super()._serve(request)


def test_reading_ahead_that_fails_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the rest, and the report does not keep that to itself."""
    with stock():
        want = digest(torch.load(path))
    monkeypatch.setattr("fastserial.loading.pump.create", lambda name, threads: FailsLater(1))
    monkeypatch.setattr("fastserial.loading.pump.SCATTERED_BLOCK", 1 << 20)
    with fast(**SMALL):
        found = torch.load(path)
        report = last_load_report()
    assert digest(found) == want
    assert report is not None
    assert "torch read the rest: [Errno 5]" in str(report.fallback)


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
    (groups / "cgroup").write_text("5:cpu:/a\n4:memory:/a\n0::/\n")
    limit(
        groups / "memory" / "a",
        limit_in_bytes="5000\n",
        usage_in_bytes="4000\n",
        stat="total_active_file 1\ntotal_inactive_file 2\nactive_file 99\n",
    )
    limit(groups / "memory", limit_in_bytes=f"{2**63 - 4096}\n")
    assert linux.available_bytes() == 1003


def test_groups_that_are_not_there(groups: Path) -> None:
    assert linux.available_bytes() == 1 << 40
    (groups / "cgroup").write_text("0::/of/the/host\n")
    assert linux.available_bytes() == 1 << 40
