"""A disk that fills up: an error with errno, path and sizes; the old checkpoint stays.

At least half of the disks must have been too small.
"""

from __future__ import annotations

import errno
import random
from collections import Counter

import pytest
from mounts import Lab, fill, need
from states import check, listing
from victims import JOBS, Zygote

pytestmark = pytest.mark.timeout(3600)

_DISK_BYTES = {"ext4": 96 << 20, "xfs": 320 << 20, "btrfs": 320 << 20, "tmpfs": 64 << 20}
_OLD_BYTES, _NEW_BYTES = 4 << 20, 14_000_000
_JOBS = [{**job, "nbytes": _NEW_BYTES} for name, job in JOBS.items() if name != "small"]


@pytest.mark.trials(4, 40)
@pytest.mark.parametrize("kind", list(_DISK_BYTES))
def test_full_disk(
    kind: str, lab: Lab, zygote: Zygote, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    need(*([] if kind == "tmpfs" else [f"mkfs.{kind}", "losetup"]))
    if kind == "tmpfs":
        disk = lab.mount("none", "tmpfs", f"size={_DISK_BYTES[kind]}")
    else:
        disk = lab.make(kind, _DISK_BYTES[kind])
    folder = disk / "saves"
    folder.mkdir()
    path = folder / "x.pt"
    refused = 0
    for trial in range(trials):
        job = _JOBS[trial % len(_JOBS)]
        # From none at all to just not enough; the last is enough.
        leave = int(_NEW_BYTES * (0, dice.random(), 0.98, dice.random(), 1.6)[trial % 5])
        assert zygote.start(path, 1, 1, **{**job, "nbytes": _OLD_BYTES}).wait() == 0
        old = path.read_bytes()
        fill(disk / "filler", leave)
        victim = zygote.start(path, 2, 1, **job)
        status = victim.wait()
        if status == 0:
            assert check(path) == 2
            counts["saves that fitted"] += 1
        else:
            error = victim.told("error")
            refused += 1
            assert error["errno"] == errno.ENOSPC, error
            assert error["filename"] == str(path)
            assert {"OSError", "RuntimeError"} <= set(error["kinds"])
            if error["needed"] is None:  # there was no room for the new file's inode
                assert leave < 1 << 20, (leave, error)
            else:
                assert error["needed"] > _NEW_BYTES * 0.9, error
                assert 0 <= error["free"] < error["needed"], error
                assert str(error["needed"]) in error["text"]
            assert path.read_bytes() == old
            assert check(path) == 1
            counts[f"ENOSPC, old file intact ({kind})"] += 1
        assert listing(folder) == ["x.pt"]
        (disk / "filler").unlink()
        path.unlink()
    assert refused >= trials // 2


def test_a_full_disk_tears_what_is_overwritten(lab: Lab, zygote: Zygote) -> None:
    """The control: without a new file the old one is gone."""
    need()
    disk = lab.mount("none", "tmpfs", f"size={_DISK_BYTES['tmpfs']}")
    path = disk / "x.pt"
    assert zygote.start(path, 1, 1, nbytes=_OLD_BYTES).wait() == 0
    old = path.read_bytes()
    fill(disk / "filler", _NEW_BYTES // 4)
    victim = zygote.start(path, 2, 1, nbytes=_NEW_BYTES, unguarded=True)
    assert victim.wait() == 3
    assert victim.told("error")["errno"] == errno.ENOSPC
    assert path.read_bytes() != old


def test_without_a_free_inode_torch_writes(lab: Lab, zygote: Zygote) -> None:
    """Stock overwrites the file, which takes no inode."""
    need()
    disk = lab.mount("none", "tmpfs", "size=64m,nr_inodes=8")
    path = disk / "x.pt"
    assert zygote.start(path, 1, 1, nbytes=_OLD_BYTES).wait() == 0
    with pytest.raises(OSError, match="No space"):
        for number in range(8):
            (disk / str(number)).touch()
    assert zygote.start(path, 2, 1, nbytes=_OLD_BYTES).wait() == 0
    assert check(path) == 2
