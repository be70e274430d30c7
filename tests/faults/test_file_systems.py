"""Correct on every file system, and the report names what it had to do without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import Lab, fill, need, run
from states import check, listing, make
from support.identity import difference, fast, last_save, save, stock
from victims import DURABLE, JOBS, Zygote

from fastserial import summary
from fastserial.reports import SAVES

pytestmark = pytest.mark.timeout(600)

_BYTES = 320 << 20


def save_and_check(folder: Path, zygote: Zygote) -> dict[str, dict[str, Any]]:
    """Save in every way, twice each, and return the reports."""
    reports = {}
    path = folder / "x.pt"
    for number, (name, job) in enumerate(JOBS.items()):
        victim = zygote.start(path, 10 * number + 1, 2, report=True, **job)
        assert victim.wait() == 0, (job, victim.lines())
        assert check(path) == 10 * number + 2
        assert listing(folder) == ["x.pt"], job
        reports[name] = victim.told("report")
        assert reports[name]["bytes"] == path.stat().st_size
    return reports


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_block_devices(kind: str, sector: int, lab: Lab, zygote: Zygote) -> None:
    need(f"mkfs.{kind}", "losetup")
    reports = save_and_check(lab.make(kind, _BYTES, sector=sector), zygote)
    direct = {name for name, report in reports.items() if report["direct"]}
    assert direct == {"zip", "legacy", "named", "not durable"}
    assert all(report["fallback"] is None for report in reports.values())


def test_tmpfs(lab: Lab, zygote: Zygote) -> None:
    need()
    save_and_check(lab.mount("none", "tmpfs", "size=200m"), zygote)


@pytest.mark.parametrize("lower_kind", ["same", "other"])
def test_overlayfs(lower_kind: str, lab: Lab, zygote: Zygote) -> None:
    """The file that is replaced comes from below; with another file system there, too."""
    need("mkfs.ext4", "losetup")
    disk = lab.make("ext4", _BYTES)
    lower = disk / "lower"
    if lower_kind == "other":
        lower = lab.mount("none", "tmpfs", "size=100m")
    upper, work = disk / "upper", disk / "work"
    for folder in (lower, upper, work):
        folder.mkdir(exist_ok=True)
    assert zygote.start(lower / "x.pt", 5, 1, nbytes=2_000_000).wait() == 0
    old = (lower / "x.pt").read_bytes()
    merged = lab.mount(
        "none", "overlay", f"lowerdir={lower}", f"upperdir={upper}", f"workdir={work}"
    )
    assert check(merged / "x.pt") == 5
    reports = save_and_check(merged, zygote)
    durable = {name for name, report in reports.items() if report["durable"]}
    assert durable == set(DURABLE), "written by torch itself"
    assert (lower / "x.pt").read_bytes() == old


def test_a_mounted_over_file(tmp_path: Path, lab: Lab, zygote: Zygote) -> None:
    """A bind-mounted file cannot be replaced, only overwritten: torch does that."""
    need()
    other = tmp_path / "other.pt"
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "x.pt"
    for file in (other, path):
        file.write_bytes(b"old")
    lab.bind(other, path)
    assert zygote.start(path, 1, 1, nbytes=1_000_000).wait() == 0
    assert check(path) == 1
    assert check(other) == 1
    assert listing(folder) == ["x.pt"]


# -- FUSE ------------------------------------------------------------------------------------------


def test_no_direct_io(lab: Lab, zygote: Zygote) -> None:
    report = save_and_check(lab.mirror_of_below("--no-direct"), zygote)["zip"]
    assert report["fallback"] == "direct I/O refused: Invalid argument"
    assert report["direct"] is False


_IN_ORDER = "the file system only takes the bytes of a file sequentially"
_NO_RENAME = "the file system cannot rename a file over another"
_NO_SYNC = "the file system cannot sync a file"
_STATES: list[dict[str, Any]] = [
    {"a": torch.arange(3000.0)},
    {"a": torch.arange(3_000_000.0), "b": [torch.full((70_000,), i) for i in range(5)]},
    {str(i): torch.full((3000,), i) for i in range(900)},
]


@pytest.mark.parametrize("fmt", ["zip", "legacy"])
@pytest.mark.parametrize(
    ("option", "by_torch"),
    [
        ("--sequential", _IN_ORDER),
        ("--no-rename", _NO_RENAME),
        ("--no-replace", _NO_RENAME),
        ("--no-sync", None),
    ],
)
def test_what_lacks_what_a_replacement_needs(
    option: str, by_torch: str | None, fmt: str, lab: Lab
) -> None:
    """As object stores do. New files, and files over others, are saved as by stock."""
    folder = lab.mirror_of_below(option)
    (folder / "new").mkdir()
    for number, state in enumerate(_STATES):
        kept, path, new = (one / f"{number}.pt" for one in (lab.folder, folder, folder / "new"))
        with stock():
            save(kept, fmt, state)
            save(path, fmt, state)
        for target, durable in ((path, True), (path, False), (new, True)):
            SAVES.clear()
            with fast(durable=durable):
                save(target, fmt, state)
            assert difference(kept.read_bytes(), target.read_bytes()) is None
            reasons = [way.reason for way in summary().saves.why_torch]
            assert reasons == ([] if by_torch is None else [by_torch])
            if by_torch is None:
                report = last_save()
                assert report.durable is False
                assert report.fallback == (_NO_SYNC if durable else None)
    names = [f"{number}.pt" for number in range(len(_STATES))]
    for place in (folder, lab.folder / "below"):
        assert sorted(os.listdir(place / "new")) == names
        assert sorted(os.listdir(place)) == [*names, "new"]


# -- compression -----------------------------------------------------------------------------------


def used(folder: Path) -> int:
    """Return the bytes in use on a file system."""
    run("btrfs", "filesystem", "sync", folder)
    stats = os.statvfs(folder)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


@pytest.mark.parametrize("way", ["mount option", "directory attribute"])
def test_what_compresses_takes_little_space(way: str, lab: Lab, zygote: Zygote) -> None:
    """No more than torch's own save, whole numbers compress well, and the report says why."""
    need("mkfs.btrfs", "losetup")
    disk = lab.make("btrfs", _BYTES, *(["compress=zstd"] if way == "mount option" else []))
    folder, nbytes = disk / "saves", 32 << 20
    folder.mkdir()
    if way == "directory attribute":
        run("chattr", "+c", folder)
    path = folder / "x.pt"

    before = used(disk)
    torch.save(make(1, nbytes), path)  # stock: nothing is installed in this process
    theirs = used(disk) - before
    assert theirs < nbytes / 2, "the file system compresses"
    path.unlink()

    before = used(disk)
    victim = zygote.start(path, 1, 1, nbytes=nbytes, report=True)
    assert victim.wait() == 0, victim.lines()
    ours = used(disk) - before
    assert check(path) == 1
    fallback = "the file system compresses this file, but not direct writes"
    assert victim.told("report")["fallback"] == fallback
    assert ours <= theirs * 1.1 + (1 << 20), (ours, theirs)

    # There is room for what is compressed, but not for what is not.
    path.unlink()
    used(disk)
    fill(disk / "filler", nbytes * 7 // 8, "f_bavail")
    victim = zygote.start(path, 2, 1, nbytes=nbytes)
    assert victim.wait() == 0, victim.lines()
    assert check(path) == 2
