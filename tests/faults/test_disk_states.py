"""Every state that a power cut may leave of a disk, during the saves of each kind.

A disk in a file, behind FUSE, keeps a log of its writes and flushes. `disk_states` goes through
what may be on it; each state is mounted, which replays the journal, and looked at.

The short form: ext4; each beginning of the writes, and all of a window but one. The long form (as
`FASTSERIAL_FAULTS=full`): more file systems, all but two, and torn writes.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from disk_states import DiskState, Event, Image, Mark, Write, disk_states, mounted, read_log
from mounts import Lab, need
from support import weak_disk
from support.forms import FULL
from support.ranks import Job, Server
from support.weak_disk import Disk, State
from workloads import (
    ALL,
    CONTROLS,
    IMPORTED,
    IN_MEMORY,
    OURS,
    Files,
    files_of,
    folder_name,
    looked_at,
    skip_without,
    variables,
)

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]
_PATIENCE = 300.0


@dataclass(frozen=True)
class Kind:
    """A file system: its name for `mount`, the options of that and of `mkfs`, and its size.

    `at_once` are mounted: the kernel knows a btrfs by its number, which all copies have. So it is
    not fast, and there are no pairs and no torn writes of it.
    """

    name: str
    nbytes: int
    mkfs: tuple[str, ...] = ()
    options: str = ""
    at_once: int = 8
    is_fast: bool = True


_LAZY = ("-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", "-b", "4096", "-J", "size=4")
_SMALL = ("-K", "--unsupported", "-l", "size=8m")  # each mount reads the whole log
KINDS = {
    "ext4": Kind("ext4", 64 << 20, _LAZY),
    "ext4, data=writeback": Kind("ext4", 64 << 20, _LAZY, "data=writeback"),
    "XFS": Kind("xfs", 96 << 20, _SMALL, "nouuid"),
    "btrfs": Kind("btrfs", 256 << 20, ("-K",), at_once=1, is_fast=False),
}
SHORT = ("ext4",)


@dataclass
class Recorded:
    """What the disk was told of a workload.

    Attributes:
        start: the disk before.
        events: from the first mark to the last; between them, that it had returned.
    """

    start: Image
    events: list[Event]
    before: Files
    after: Files


def run_and_record(lab: Lab, kind: Kind) -> dict[str, Recorded]:
    """Run all workloads on a disk, and record what it is told."""
    below = lab.folder / "below"
    below.mkdir()
    lab.image(kind.nbytes, below)
    fuse = lab.mirror(below, "--recording")
    (image,) = (path for path in fuse.iterdir() if path.suffix == ".img")
    device = lab.loop(image)
    lab.mkfs(kind.name, device, *kind.mkfs)
    disk = lab.mount(device, kind.name, *filter(None, [kind.options]))
    before: dict[str, Files] = {}
    with closing(Server(*IMPORTED, variables=variables())) as server:
        for ranks in sorted({one.ranks for one in ALL.values()}):
            names = [name for name, one in ALL.items() if one.ranks == ranks and one.can_run]
            text = {"root": str(disk), "names": names, "marks": str(fuse / ".mark")}
            job = Job("crash_workloads", ranks, json.dumps(text), server=server)
            job.await_text("ready", _PATIENCE)
            before |= {name: files_of(disk / folder_name(name)) for name in names}
            for rank in range(ranks):
                os.kill(job.pid(rank), signal.SIGUSR1)
            ended = job.wait(_PATIENCE)
            assert all(end.code == 0 for end in ended), ended
    after = {name: files_of(disk / folder_name(name)) for name in before}
    lab.unmount(disk)
    at, events, found = Image(), read_log(Path(f"{below}.log")), {}
    marks = {event.text: index for index, event in enumerate(events) if isinstance(event, Mark)}
    done = 0
    for name in sorted(before, key=lambda name: marks[f"begin {name}"]):
        first, last = marks[f"begin {name}"], marks[f"end {name}"]
        for event in events[done:first]:
            if isinstance(event, Write):
                at.write(event)
        done = first
        found[name] = Recorded(
            Image(at.blocks), events[first + 1 : last + 1], before[name], after[name]
        )
    return found


@dataclass
class Judged:
    """What the states came to; `worst` is the smallest that must not be."""

    tried: int
    outcomes: Counter[str]
    worst: DiskState | None = None
    said: str = ""

    def row(self, name: str, kind: str) -> str:
        outcomes = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        return f"| {name} | {kind} | {self.tried} | {self.outcomes.total()} | {outcomes} |"

    def story(self) -> str:
        if self.worst is None:
            return ""
        lost = "; ".join(self.worst.lost) or "nothing"
        return f"    {self.said}: after event {self.worst.after}; lost: {lost}"


def judge(name: str, kind: Kind, recorded: Recorded, scratch: Path) -> Judged:
    """Mount each state once, and look at what is in it."""
    workload = ALL[name]
    result = Judged(0, Counter())
    marks = [index for index, one in enumerate(recorded.events) if isinstance(one, Mark)]
    trees: dict[bytes, State | str] = {}
    said: dict[State, str] = {}
    seen: set[tuple[bytes, bool]] = set()

    def tree(state: DiskState) -> State | str:
        place = Path(tempfile.mkdtemp(dir=scratch))
        try:
            return tree_of(name, kind, state, place)
        finally:
            shutil.rmtree(place)

    def look(found: DiskState) -> str:
        there = trees[found.key]
        if isinstance(there, str):
            return there
        if there not in said:
            said[there] = looked_at(workload, recorded.before, recorded.after, there, scratch)
        return said[there]

    states = disk_states(recorded.start, recorded.events, FULL and kind.is_fast)
    with ThreadPoolExecutor(kind.at_once) as pool:  # a mount mostly waits
        while batch := list(itertools.islice(states, 64)):
            new = {state.key: state for state in batch if state.key not in trees}
            trees |= dict(zip(new, pool.map(tree, new.values()), strict=True))
            for found in batch:
                result.tried += 1
                what, is_late = look(found), found.after >= marks[0]
                if (found.key, is_late) not in seen:
                    seen.add((found.key, is_late))
                    result.outcomes[what] += 1
                if what not in (workload.then if is_late else workload.may):
                    key = (len(found.lost), found.after)
                    if result.worst is None or key < (len(result.worst.lost), result.worst.after):
                        result.worst, result.said = found, what
                        result.worst.image.blocks.clear()
    return result


def tree_of(name: str, kind: Kind, state: DiskState, scratch: Path) -> State | str:
    """Return what is in the workload's folder, or why it cannot be read."""
    image, where = scratch / "image", scratch / "where"
    where.mkdir()
    state.image.store(image, kind.nbytes)
    try:
        with mounted(image, kind.name, where, kind.options):
            return weak_disk.everything(Disk.of(where / folder_name(name)))
    except OSError as error:
        return f"cannot be mounted or read: {error.strerror}"


@pytest.fixture(scope="module", params=KINDS if FULL else SHORT)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _mounts: None
) -> Iterator[tuple[str, dict[str, Recorded]]]:
    kind = KINDS[request.param]
    need(f"mkfs.{kind.name}", "losetup")
    with Lab(tmp_path_factory.mktemp("disk")) as lab:
        yield request.param, run_and_record(lab, kind)


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", OURS)
def test_old_or_new(name: str, disk: tuple[str, dict[str, Recorded]], scratch: Path) -> None:
    skip_without(OURS[name])
    kind, recorded = disk
    result = judge(name, KINDS[kind], recorded[name], scratch)
    print(result.row(name, kind))
    assert result.worst is None, result.story()
    assert set(result.outcomes) >= {"old", "new"}


# Lost whatever the file system; what the other controls lose depends on it.
_LOSE = ("the folder is not synced",)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_others_lose_is_found(
    name: str, disk: tuple[str, dict[str, Recorded]], scratch: Path
) -> None:
    skip_without(CONTROLS[name])
    if not (FULL or name in _LOSE):
        pytest.skip("in the long form")
    kind, recorded = disk
    result = judge(name, KINDS[kind], recorded[name], scratch)
    print(result.row(name, kind))
    print(result.story())
    assert result.worst is not None or name not in _LOSE
