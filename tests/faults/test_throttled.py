"""A disk of 60 MB/s, as shared and network storage often is: what is read of it, and how often.

Rule: a node reads a byte from its disk no more often than it would with stock torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from mounts import Lab, need
from support import processes
from support.forms import FULL

from fastserial.bench.state import chill

pytestmark = pytest.mark.timeout(3600)

_SPEED = 60_000_000  # bytes a second
_BLKIO = Path("/sys/fs/cgroup/blkio")  # version 1: the limits of its root hold for write-back, too
_SECTOR = 512
_SLACK = 4 << 20  # bytes: metadata, read ahead past the end
_TENSORS = 12 if FULL else 4  # of 4 MB
# What runs: saves and loads, the number of processes at once, and whether the cache is emptied.
_ALONE = {"first load": ("load", 1, True), "second load": ("load", 1, False)}
_STEPS = {
    **(_ALONE if FULL else {}),
    "loads at once": ("load", 4 if FULL else 2, True),
    "save": ("save", 1, False),
    "load after a save": ("load", 1, False),
}


class Disk:
    """A file system on a throttled loop device."""

    def __init__(self, lab: Lab, stack: ExitStack) -> None:
        image = lab.image(1 << 30, Path("/dev/shm"))
        stack.callback(image.unlink)
        device = lab.loop(image, "--direct-io=on")
        lab.mkfs("ext4", device)
        self.folder = lab.mount(device, "ext4", "lazytime")
        number = os.stat(device).st_rdev
        name = f"{os.major(number)}:{os.minor(number)}"
        self._stat = Path("/sys/dev/block") / name / "stat"
        for kind in ("read", "write"):
            place = _BLKIO / f"blkio.throttle.{kind}_bps_device"
            place.write_text(f"{name} {_SPEED}")
            stack.callback(place.write_text, f"{name} 0")

    def bytes_read(self) -> int:
        return int(self._stat.read_text().split()[2]) * _SECTOR


@pytest.fixture
def disk(lab: Lab) -> Iterator[Disk]:
    need("mkfs.ext4", "losetup")
    if not (_BLKIO / "blkio.throttle.read_bps_device").exists():
        pytest.skip("needs the control group blkio (version 1) to throttle a device")
    with ExitStack() as stack:
        yield Disk(lab, stack)


# Waits for a line once torch is there, so that several start at once.
_PROGRAM = """
import sys, torch, fastserial
what, how, path, tensors = sys.argv[1:]
if how == "fastserial":
    fastserial.install()
state = [torch.rand(1_000_000) for _ in range(int(tensors))] if what == "save" else []
print("ready", flush=True)
sys.stdin.readline()
torch.save(state, path) if what == "save" else torch.load(path)
print("done", flush=True)
"""


def run(disk: Disk, count: int, *words: object) -> int:
    """Run `count` processes at once; return how many bytes they read."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(processes.start("-c", _PROGRAM, *words)) for _ in range(count)
        ]
        assert [one.stdout.readline() for one in started if one.stdout] == ["ready\n"] * count
        before = disk.bytes_read()
        for one in started:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        assert [one.stdout.readline() for one in started if one.stdout] == ["done\n"] * count
        return disk.bytes_read() - before


@pytest.mark.trials(1, 5)
def test_no_byte_is_read_more_often_than_by_stock(disk: Disk, trials: int) -> None:
    path = disk.folder / "f.pt"
    run(disk, 1, "save", "stock", path, _TENSORS)
    for _ in range(trials):
        nbytes: dict[str, list[int]] = {}
        for how in ("stock", "fastserial"):
            for step, (what, count, cold) in _STEPS.items():
                if cold:
                    chill([path])
                nbytes.setdefault(step, []).append(run(disk, count, what, how, path, _TENSORS))
        for step, (stock, ours) in nbytes.items():
            assert ours <= stock + _SLACK, f"{step}: {ours} bytes read, {stock} by stock"
