"""Where the file system compresses, a save takes no more space than torch's own, and says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from mounts import Lab, need
from states import check, make
from victims import Zygote

pytestmark = pytest.mark.timeout(600)

_BYTES = 256 << 20
_STATE = 32 << 20  # whole numbers, which compress well
_WAYS = {
    "mount option": (["compress=zstd"], []),
    "forced by a mount option": (["compress-force=lzo"], ["chattr", "+m"]),
    "directory attribute": ([], ["chattr", "+c"]),
    "directory property": ([], ["btrfs", "property", "set"]),
}
_FALLBACK = "the file system compresses this file, but not direct writes"


def used(folder: Path) -> int:
    """Return the bytes in use on a file system."""
    subprocess.run(["btrfs", "filesystem", "sync", folder], check=True, capture_output=True)
    stats = os.statvfs(folder)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def mark(lab: Lab, folder: Path, words: list[str]) -> None:
    if words[:1] == ["btrfs"]:
        lab.run(*words, folder, "compression", "zstd")
    elif words:
        lab.run(*words, folder)


@pytest.mark.parametrize("way", list(_WAYS))
def test_what_compresses_takes_little_space(way: str, lab: Lab, zygote: Zygote) -> None:
    need("mkfs.btrfs", "losetup")
    options, words = _WAYS[way]
    disk = lab.make("btrfs", _BYTES, *options)
    folder = disk / "saves"
    folder.mkdir()
    mark(lab, folder, words)
    path = folder / "x.pt"

    before = used(disk)
    torch.save(make(1, _STATE), path)  # stock: nothing is installed in this process
    stock = used(disk) - before
    assert stock < _STATE / 2, "the file system compresses"
    path.unlink()

    before = used(disk)
    victim = zygote.start(path, 1, 1, nbytes=_STATE, report=True)
    assert victim.wait() == 0, victim.lines()
    ours = used(disk) - before
    assert check(path) == 1
    assert victim.report()["fallback"] == _FALLBACK
    assert ours <= stock * 1.1 + (1 << 20), (ours, stock)

    # There is room for what is compressed, but not for what is not.
    path.unlink()
    used(disk)
    fill_leaving(disk, _STATE * 7 // 8)
    torch.save(make(2, _STATE), path)
    path.unlink()
    used(disk)
    victim = zygote.start(path, 2, 1, nbytes=_STATE, report=True)
    assert victim.wait() == 0, victim.lines()
    assert check(path) == 2


def fill_leaving(disk: Path, leave: int) -> None:
    """Reserve all but `leave` bytes."""
    with open(disk / "filler", "wb") as filler:
        size, more = 0, 1 << 40
        while more >= 4096:
            stats = os.statvfs(disk)
            more = min(more, stats.f_bavail * stats.f_frsize - leave)
            try:
                if more > 0:
                    os.posix_fallocate(filler.fileno(), size, more)
                    size += more
            except OSError:  # not in one piece
                more //= 2


def test_what_does_not_compress_goes_the_fast_way(lab: Lab, zygote: Zygote) -> None:
    need("mkfs.btrfs", "losetup")
    disk = lab.make("btrfs", _BYTES, "compress=zstd")
    folder = disk / "+C"
    folder.mkdir()
    lab.run("chattr", "+C", folder)
    victim = zygote.start(folder / "x.pt", 1, 1, nbytes=9_000_000, report=True)
    assert victim.wait() == 0, victim.lines()
    assert victim.report()["fallback"] is None
    job = {"nbytes": 9_000_000, "options": {"direct": True}}
    victim = zygote.start(disk / "x.pt", 1, 1, report=True, **job)
    assert victim.wait() == 0, victim.lines()
    assert victim.report()["direct"], "asked for"
