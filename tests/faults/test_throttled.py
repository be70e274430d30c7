"""A disk of 60 MB/s, as shared and network storage often is: what is read of it, and how often.

Rule: a node reads a byte from its disk no more often than it would with stock torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mounts import Lab, need
from proofs import Proof

_SPEED = 60_000_000  # bytes a second
_BLKIO = Path("/sys/fs/cgroup/blkio")  # version 1: the limits of its root hold for write-back, too
_SECTOR = 512
_SLACK = 4 << 20  # bytes: metadata, read ahead past the end
_TIME = 1.1
_ENOUGH = 5  # trials; the median of fewer says more of what else the machine does
_TENSORS = {True: 48, False: 12}  # of 4 MB; with enough trials, or fewer

_AT_ONCE = 4 if os.environ.get("FASTSERIAL_FAULTS") == "full" else 2
# What runs: saves and loads, the number of processes at once, and whether the cache is emptied.
_STEPS = {
    "first load": ("load", 1, True),
    "second load": ("load", 1, False),
    "loads at once": ("load", _AT_ONCE, True),
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


@contextmanager
def processes(count: int, *words: object) -> Iterator[list[subprocess.Popen[str]]]:
    program = str(Path(__file__).with_name("throttled.py"))
    command = [sys.executable, program, *map(str, words)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_clean()
                )
            )
            for _ in range(count)
        ]
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        yield started
        for one in started:
            assert one.stdin is not None
            one.stdin.close()


def _clean() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("FASTSERIAL")}


def run(disk: Disk, count: int, *words: object) -> tuple[int, float]:
    """Run `count` processes at once; return bytes read, and the longest time (seconds)."""
    with processes(count, *words) as started:
        before = disk.bytes_read()
        for one in started:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        took = [float(one.stdout.readline()) for one in started if one.stdout is not None]
        return disk.bytes_read() - before, max(took)


def chill(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.proof("throttled disk: first and second load, loads at once, save, load after a save")
@pytest.mark.trials(1, 5)
def test_no_byte_is_read_more_often_than_by_stock(disk: Disk, trials: int, proof: Proof) -> None:
    nbytes: dict[str, dict[str, list[int]]] = {}
    seconds: dict[str, dict[str, list[float]]] = {}
    path = disk.folder / "f.pt"
    tensors = _TENSORS[trials >= _ENOUGH]
    run(disk, 1, "save", "stock", path, tensors)
    for _ in range(trials):
        for how in ("stock", "fastserial"):
            for step, (what, count, cold) in _STEPS.items():
                if cold:
                    chill(path)
                read, took = run(disk, count, what, how, path, tensors)
                nbytes.setdefault(step, {}).setdefault(how, []).append(read)
                seconds.setdefault(step, {}).setdefault(how, []).append(took)
    for step, found in nbytes.items():
        for read, most in zip(found["fastserial"], found["stock"], strict=True):
            assert read <= most + _SLACK, f"{step}: {read} bytes read, {most} by stock"
            proof.count("no more bytes read than by stock")
    for step, (_, _, cold) in _STEPS.items():
        if cold:  # what the disk's speed decides; the rest is a matter of processors
            ratio = statistics.median(
                ours / stock
                for ours, stock in zip(
                    seconds[step]["fastserial"], seconds[step]["stock"], strict=True
                )
            )
            print(f"{step}: {ratio:.2f} x the time of stock")
            if trials >= _ENOUGH:
                assert ratio <= _TIME, f"{step}: {ratio:.2f} x the time of stock"
