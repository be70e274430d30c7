"""Where the file system compresses, a save takes no more space than torch's own, and says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from mounts import Lab, fill, need, run
from states import check, make
from victims import Zygote

pytestmark = pytest.mark.timeout(600)

_BYTES = 256 << 20
_STATE = 32 << 20  # whole numbers, which compress well
_FALLBACK = "the file system compresses this file, but not direct writes"
_WAYS: dict[str, tuple[list[str], list[str]]] = {
    "mount option": (["compress=zstd"], []),
    "directory attribute": ([], ["chattr", "+c"]),
}


def used(folder: Path) -> int:
    """Return the bytes in use on a file system."""
    run("btrfs", "filesystem", "sync", folder)
    stats = os.statvfs(folder)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


@pytest.mark.parametrize("way", _WAYS)
def test_what_compresses_takes_little_space(way: str, lab: Lab, zygote: Zygote) -> None:
    need("mkfs.btrfs", "losetup")
    options, words = _WAYS[way]
    disk = lab.make("btrfs", _BYTES, *options)
    folder = disk / "saves"
    folder.mkdir()
    if words:
        run(*words, folder)
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
    fill(disk / "filler", _STATE * 7 // 8, "f_bavail")
    victim = zygote.start(path, 2, 1, nbytes=_STATE)
    assert victim.wait() == 0, victim.lines()
    assert check(path) == 2
