"""Every state that a power cut may leave of a save, if the file system promises little.

The system calls of each workload are traced. `support.weak_disk` goes through what may be on the
disk, whatever a file system does; each state is made, and looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mounts import need
from support import weak_disk
from support.forms import FULL
from support.ranks import Job, Server
from support.traced_calls import Reader, threads_of, traced
from support.weak_disk import Disk, Found, Operation, State
from workloads import (
    ALL,
    CONTROLS,
    IMPORTED,
    IN_MEMORY,
    OURS,
    Files,
    Workload,
    files_of,
    folder_name,
    looked_at,
    skip_without,
    variables,
)

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]
_PATIENCE = 120.0
_MOST_OF_A_CONTROL = 300  # states, in the short form


@dataclass
class Recorded:
    """What a workload did.

    Attributes:
        start: what was on the disk before.
        operations: with marks: it began, and has returned on a rank.
        before, after: the files then.
    """

    start: Disk
    operations: list[Operation]
    before: Files
    after: Files


def run_and_trace(folder: Path, ranks: int, server: Server) -> dict[str, Recorded]:
    """Run all workloads of so many ranks in a folder, and trace them."""
    names = [name for name, one in ALL.items() if one.ranks == ranks and one.can_run]
    root = folder / f"{ranks}"
    root.mkdir()
    umask = os.umask(0o022)
    os.umask(umask)
    text = json.dumps({"root": str(root), "names": names, "marks": None})
    job = Job("crash_workloads", ranks, text, server=server)
    job.await_text("ready", _PATIENCE)
    places = {name: root / folder_name(name) for name in names}
    before = {name: files_of(place) for name, place in places.items()}
    pids = [job.pid(rank) for rank in range(ranks)]
    trace = folder / f"{ranks}.trace"
    with traced(pids, trace):
        reader = Reader(root, umask, threads_of(pids))
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        ended = job.wait(_PATIENCE)
    assert all(end.code == 0 for end in ended), ended
    reader.read(trace)
    trace.unlink()
    whole, there = map(weak_disk.everything, (reader.disk, Disk.of(root)))
    assert whole == there, "the trace does not tell all"
    found = {}
    for name, place in places.items():
        start, operations = reader.between(f"begin {name}", f"end {name}", place.name)
        found[name] = Recorded(start, operations, before[name], files_of(place))
    return found


@dataclass
class Judged:
    """What a workload's states came to.

    Attributes:
        subsets: what may be lost at each moment: so many choices.
        outcomes: of those that differ; those of a save that has returned apart.
        worst: the smallest state that must not be: the fewest losses, then the earliest.
    """

    subsets: int
    outcomes: Counter[tuple[bool, str]] = field(default_factory=Counter)
    worst: Found | None = None
    said: str = ""

    def row(self, name: str) -> str:
        counted = Counter({f"{what}": 0 for _, what in self.outcomes})
        for (_, what), count in self.outcomes.items():
            counted[what] += count
        outcomes = ", ".join(f"{count} {what}" for what, count in sorted(counted.items()))
        return f"| {name} | {self.subsets} | {self.outcomes.total()} | {outcomes} |"

    def story(self, operations: list[Operation]) -> str:
        """Tell of the smallest state that must not be."""
        if self.worst is None:
            return ""
        done = [one.text for one in operations[: self.worst.after + 1]]
        lost = "\n".join(f"    lost: {text}" for text in self.worst.lost) or "    nothing is lost"
        return f"{self.said} after `{done[-1]}`, the {len(done)}th call\n{lost}"


def judge(workload: Workload, recorded: Recorded, scratch: Path) -> Judged:
    """Look at each state once."""
    result = Judged(weak_disk.subsets_of(recorded.start, recorded.operations))
    known: dict[State, str] = {}
    seen: set[tuple[State, bool]] = set()
    returned = next(
        index for index, one in enumerate(recorded.operations) if one.text.startswith("returned")
    )
    for found in weak_disk.states_of(recorded.start, recorded.operations, workload.matters):
        if workload.loses and not FULL and len(known) > _MOST_OF_A_CONTROL:
            break
        if found.state not in known:
            known[found.state] = looked_at(
                workload, recorded.before, recorded.after, found.state, scratch
            )
        what, is_late = known[found.state], found.after >= returned
        if (found.state, is_late) not in seen:
            seen.add((found.state, is_late))
            result.outcomes[is_late, what] += 1
        if what not in (workload.then if is_late else workload.may):
            key = (len(found.lost), found.after)
            if result.worst is None or key < (len(result.worst.lost), result.worst.after):
                result.worst, result.said = found, what
    return result


@pytest.fixture(scope="module")
def recorded() -> dict[str, Recorded]:
    need("strace", root=False)
    found: dict[str, Recorded] = {}
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder,
        contextlib.closing(Server(*IMPORTED, variables=variables())) as server,
    ):
        for ranks in sorted({one.ranks for one in ALL.values()}):
            found |= run_and_trace(Path(folder), ranks, server)
    return found


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", OURS)
def test_old_or_new(name: str, recorded: dict[str, Recorded], scratch: Path) -> None:
    skip_without(OURS[name])
    result = judge(OURS[name], recorded[name], scratch)
    print(result.row(name))
    assert result.worst is None, result.story(recorded[name].operations)
    assert {what for _, what in result.outcomes} >= {"old", "new"}


@pytest.mark.parametrize("name", CONTROLS)
def test_what_others_lose_is_found(name: str, recorded: dict[str, Recorded], scratch: Path) -> None:
    skip_without(CONTROLS[name])
    result = judge(CONTROLS[name], recorded[name], scratch)
    print(result.row(name))
    print(result.story(recorded[name].operations))
    assert result.worst is not None
