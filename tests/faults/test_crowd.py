"""Many threads, many processes, many saves: readers always see a whole checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from crowd import TARGETS
from proofs import Proof
from states import check, is_whole, listing
from support import processes

pytestmark = pytest.mark.timeout(3600)

_SCRIPT = Path(__file__).with_name("crowd.py")
_MORE_MEMORY = 6 << 20  # bytes that the noise of an allocator may add


def read_while(
    folder: Path,
    read: Callable[[Path], object],
    count: int,
    threads: int,
    saves: int,
    *way: str,
) -> list[object]:
    """Read the targets over and over until all saves are done; return what the reads gave."""
    writers = [
        processes.start(_SCRIPT, folder, threads, saves, seed, *way) for seed in range(1, count + 1)
    ]
    found = []
    try:
        while any(writer.poll() is None for writer in writers):
            found += [read(folder / name) for name in TARGETS if (folder / name).exists()]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert way or [writer.returncode for writer in writers] == [0] * len(writers)
    return found


@pytest.mark.proof("saves at once")
@pytest.mark.trials(8, 200)
@pytest.mark.parametrize(("count", "threads"), [(1, 8), (4, 1)])
def test_crowd(count: int, threads: int, tmp_path: Path, proof: Proof, trials: int) -> None:
    numbers = read_while(tmp_path, check, count, threads, trials)
    assert len(set(numbers)) >= 5, "too few reads between the first save and the last"
    assert listing(tmp_path) == sorted(TARGETS)
    for name in TARGETS:
        check(tmp_path / name)
    kind = f"{threads} threads" if threads > 1 else f"{count} processes"
    proof.count(f"saves of {kind}", count * threads * trials)
    proof.outcomes[f"reads beside {kind}, all whole"] += len(numbers)


def test_readers_see_what_is_torn(tmp_path: Path) -> None:
    """The control: stock torch overwrites, and the same readers find torn files."""
    assert False in read_while(tmp_path, is_whole, 1, 8, 20, "stock")


@pytest.mark.proof("soak: saves in one process")
@pytest.mark.trials(210, 2000)
def test_soak(tmp_path: Path, proof: Proof, trials: int) -> None:
    ended = processes.python(_SCRIPT, tmp_path, "soak", trials, timeout=3600)
    found = [json.loads(line) for line in ended.out.splitlines()]
    first, last = found[0], found[-1]
    for what in ("descriptors", "threads"):
        assert last[what] == first[what], found
    assert last["memory"] - first["memory"] < _MORE_MEMORY, found
    assert last["mappings"] - first["mappings"] < 20, found
    assert set(listing(tmp_path)) == {"a.pt", "legacy.pt"}
    proof.count("saves", trials)
    grown = (last["memory"] - first["memory"]) / 1024
    proof.outcomes["KiB of growth"] += round(grown)
