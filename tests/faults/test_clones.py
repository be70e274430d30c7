"""Saves with a base on real file systems with reflinks: stock's bytes, few of them written."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from mounts import Lab, fill, need, run
from support import changing
from support.forms import FULL
from victims import Zygote

import fastserial
from fastserial.saving.incremental import Base

pytestmark = pytest.mark.timeout(3600)

MiB = 1 << 20
KILLS_ON = pytest.mark.parametrize("disk", ["xfs", "btrfs"] if FULL else ["xfs"], indirect=True)


@pytest.fixture(params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, lab: Lab) -> Path:
    """An empty file system with reflinks, of 640 MiB."""
    need(f"mkfs.{request.param}", "losetup")
    return lab.make(request.param, 640 * MiB)


def written(folder: Path) -> int:
    """Return the bytes that the file system has written to its device."""
    run("sync", "-f", folder)
    number = os.stat(run("findmnt", "-no", "SOURCE", folder)).st_rdev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    return int(node.read_text().split()[6]) * 512


def backbone(nbytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    frozen = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return {"frozen": frozen, "adapter": torch.zeros(MiB // 4), "step": 0}


def check(state: Any, path: Path, other: Path) -> None:
    """Compare a file with stock's."""
    torch.save(state, other / path.name)
    assert path.read_bytes() == (other / path.name).read_bytes()


def test_little_is_written_and_little_space_is_needed(disk: Path, tmp_path: Path) -> None:
    size, count = (256 * MiB, 20) if FULL else (64 * MiB, 4)
    state = backbone(size)
    files = [disk / f"{number:02}.pt" for number in range(count + 1)]
    fastserial.save(state, files[0])
    before, free = written(disk), os.statvfs(disk).f_bavail
    seconds = 0.0
    for base, path in pairwise(files):
        state["adapter"] += 1
        report = fastserial.save(state, path, base=base)
        assert report is not None
        assert report.cloned > size - 8192
        seconds += report.seconds
        check(state, path, tmp_path)
    taken = (free - os.statvfs(disk).f_bavail) * os.statvfs(disk).f_frsize
    nbytes = written(disk) - before
    print(f"{count} saves of {size >> 20} MiB: {nbytes / MiB:.0f} MiB written, {seconds:.1f} s")
    assert nbytes < count * 4 * MiB
    assert taken < count * 4 * MiB
    for path in files[:-1]:  # each file is whole without the others
        path.unlink()
    path = files[-1]
    assert fastserial.verify(path, cold=True).ok
    fill(disk / "filler", size // 2, "f_bavail")  # there is no room for all of it
    state["adapter"] += 1
    report = fastserial.save(state, path, base=path)
    assert report is not None
    assert report.cloned > size - 8192
    check(state, path, tmp_path)


@pytest.mark.trials(6, 1000)
def test_random_sequences(
    disk: Path, tmp_path: Path, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    cloned = 0
    for _ in range(trials):
        base = None
        options = {
            "small_file": dice.choice([0, MiB]),
            "direct": dice.choice([True, False, "auto"]),
        }
        with fastserial.options(durable=dice.random() < 0.3, **options):
            for number, state in enumerate(changing.states(dice, 6)):
                path = disk / f"{number % 2}.pt"
                report = fastserial.save(state, path, base=base)
                assert report is not None
                cloned += report.cloned
                check(state, path, tmp_path)
                base = path
        counts["stock's bytes, each of 6 files"] += 1
    assert cloned > trials * MiB


def test_a_base_that_is_replaced_during_the_save(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, path, base = backbone(16 * MiB), disk / "x.pt", disk / "y.pt"
    fastserial.save(state, base)
    clone = Base.clone

    def replaced_before(self: Base, *arguments: Any) -> Any:
        base.unlink()
        base.write_bytes(b"another file")
        return clone(self, *arguments)

    monkeypatch.setattr(Base, "clone", replaced_before)
    report = fastserial.save(state, path, base=base)
    assert report is not None
    assert report.cloned > 16 * MiB - 8192
    check(state, path, tmp_path)


@KILLS_ON
@pytest.mark.trials(5, 200)
def test_kill(
    disk: Path, zygote: Zygote, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    path, job = disk / "x.pt", {"nbytes": 6_000_000, "frozen": 32 * MiB, "report": True}
    assert zygote.start(path, 1, 1, **job).wait() == 0
    newest, hits = 1, 0
    for _ in range(trials):
        victim = zygote.start(path, newest + 1, 10_000, **job)
        victim.kill_in_a_save(dice, 0.02, 0.2, 0.4)
        hits += victim.is_saving()
        found = victim.left(newest)
        counts["new file whole" if found > newest else "old file whole"] += 1
        after = zygote.start(path, found + 1, 1, **job)
        assert after.wait() == 0
        assert after.told("report")["cloned"] > 31 * MiB
        assert states.listing(disk) == ["x.pt"]
        newest = found + 1
        assert torch.equal(torch.load(path)["frozen"], torch.arange(4 * MiB))
    assert hits >= trials // 2


@KILLS_ON
@pytest.mark.trials(2, 50)
def test_killed_ranks(disk: Path, zygote: Zygote, dice: random.Random, trials: int) -> None:
    """A rank is killed while it clones from the file that the save replaces."""
    hits = 0
    for trial in range(trials):
        folder = disk / str(trial)
        (folder / "out").mkdir(parents=True)
        (folder / "flags").write_bytes(bytes(4))
        path = folder / "out" / "file.pt"
        job = zygote.job("ranks_die", 2, folder, "clones")
        victim, ended = job.kill_somewhere(path, dice, 100)
        assert all(end.code == 0 for rank, end in enumerate(ended) if rank != victim), ended
        hits += (folder / "flags").read_bytes()[victim]
        state = torch.load(path)
        assert all((state[key] == state["step"]).all() for key in ("rows", "columns", "all"))
        assert torch.equal(state["frozen"], torch.arange(1 << 21))
        assert fastserial.verify(path).ok
        fastserial.save(state, path)
        assert os.listdir(path.parent) == ["file.pt"]
        shutil.rmtree(folder)
    assert hits >= trials // 2
