"""Power cuts: what a disk holds at a random moment is mounted, and the checkpoint looked at.

`snapshots`: the disk is an image on btrfs, a cut is a reflink copy of it, which holds all that
was written so far. `write cache`: the disk is a FUSE file that forgets a random part of what it
was not told to flush, down to single sectors, as a disk with a write cache does.

At least a third of the cuts must come while a save runs.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mounts import Lab, need, run
from states import check, listing
from victims import DURABLE, Zygote

pytestmark = pytest.mark.timeout(3600)

_DISK_BYTES = {"ext4": 256 << 20, "xfs": 320 << 20, "btrfs": 320 << 20}
_JOBS = list(DURABLE.values())


@contextlib.contextmanager
def mounted(lab: Lab, kind: str, copy: Path, trial: int) -> Iterator[Path]:
    """Mount what a cut left, and remove it in the end."""
    with Lab(lab.folder / f"after{trial}") as after:
        after.folder.mkdir()
        yield after.mount(after.loop(copy), kind, *(["nouuid"] if kind == "xfs" else []))
    copy.unlink()


def cut_and_look(
    lab: Lab,
    kind: str,
    disk: Path,
    cut: Callable[[Path], None],
    victims: Zygote,
    dice: random.Random,
    counts: Counter[str],
    trials: int,
) -> None:
    """Save over and over on a mounted disk, cut the power at random moments, and check."""
    newest = dict.fromkeys((f"{index}.pt" for index in range(len(_JOBS))), 0)
    copy = lab.folder / "after.img"
    hits = 0
    for trial in range(trials):
        index = trial % len(_JOBS)
        job = _JOBS[index]
        path = disk / f"{index}.pt"
        before = newest[path.name]
        victim = victims.start(path, before + 1, 10_000, **job)
        victim.await_line("done")
        time.sleep(dice.uniform(0, 0.3))

        hits += victim.is_saving()
        returned = victim.last("done")
        cut(copy)
        begun = victim.last("start")
        assert returned is not None
        assert begun is not None
        victim.kill()
        newest[path.name] = victim.left()

        with mounted(lab, kind, copy, trial) as found_at:
            found = check(found_at / path.name)
            assert returned <= found <= begun, (returned, found, begun)
            for name, number in newest.items():
                if number and name != path.name:
                    assert check(found_at / name) == number
            strays = set(listing(found_at)) - set(newest)
            assert all(".fastserial-" in name for name in strays), strays
            again = victims.start(found_at / path.name, found + 1, 1, **job)
            assert again.wait() == 0, again.lines()
            # Each victim was killed; what it left goes with the next save to the same target.
            assert not any(name.startswith(f".{path.name}.") for name in listing(found_at))
        counts[f"{kind}: last returned save" if found == returned else f"{kind}: a newer one"] += 1
    assert hits >= trials // 3


def reflinked_disk(lab: Lab, kind: str) -> tuple[Path, Callable[[Path], None]]:
    """Mount a disk whose image is on btrfs; return where, and how to cut its power."""
    need("mkfs.btrfs", f"mkfs.{kind}", "losetup")
    host = lab.make("btrfs", 4 << 30)
    image = lab.image(_DISK_BYTES[kind], host)
    device = lab.loop(image)
    lab.mkfs(kind, device)
    disk = lab.mount(device, kind)

    def cut(copy: Path) -> None:
        snapshot = host / "snapshot.img"
        run("cp", "--reflink=always", image, snapshot)
        run("cp", "--sparse=always", snapshot, copy)
        snapshot.unlink()

    return disk, cut


@pytest.mark.trials(3, 60)
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_snapshots(
    kind: str, lab: Lab, zygote: Zygote, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    disk, cut = reflinked_disk(lab, kind)
    cut_and_look(lab, kind, disk, cut, zygote, dice, counts, trials)


@pytest.mark.trials(3, 30)
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_new_names(kind: str, lab: Lab, zygote: Zygote, counts: Counter[str], trials: int) -> None:
    """A file that is given its name at once, where there was none, is there when a save returns."""
    disk, cut = reflinked_disk(lab, kind)
    copy = lab.folder / "after.img"
    for trial in range(trials):
        job = _JOBS[trial % len(_JOBS)]
        assert zygote.start(disk / f"{trial}.pt", 1, 1, **job).wait() == 0
        cut(copy)
        with mounted(lab, kind, copy, trial) as found_at:
            found = [check(found_at / f"{number}.pt") for number in range(trial + 1)]
            assert found == [1] * (trial + 1)
        counts[kind] += 1


def volatile_disk(lab: Lab, kind: str) -> tuple[Path, Callable[[Path], None]]:
    """Mount a disk with a write cache; return where, and how to cut its power."""
    need(f"mkfs.{kind}", "losetup")
    below = lab.folder / "below"
    below.mkdir()
    lab.image(_DISK_BYTES[kind], below)
    fuse = lab.mirror(below, "--volatile")
    (image,) = (path for path in fuse.iterdir() if path.suffix == ".img")
    device = lab.loop(image)
    lab.mkfs(kind, device)

    def cut(copy: Path) -> None:
        (fuse / ".cut").write_text(str(copy))

    return lab.mount(device, kind), cut


@pytest.mark.trials(3, 60)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_write_cache(
    kind: str, lab: Lab, zygote: Zygote, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    disk, cut = volatile_disk(lab, kind)
    cut_and_look(lab, kind, disk, cut, zygote, dice, counts, trials)


def test_the_cuts_show_what_is_not_synced(lab: Lab, zygote: Zygote) -> None:
    """Without `durable` a save that has returned is lost: the test above can fail."""
    disk, cut = volatile_disk(lab, "xfs")
    path = disk / "x.pt"
    job = {"nbytes": 5_000_000, "options": {"durable": False}}
    assert zygote.start(path, 1, 1, **job).wait() == 0
    copy = lab.folder / "after.img"
    cut(copy)
    with mounted(lab, "xfs", copy, 0) as found_at:
        assert listing(found_at) == []
