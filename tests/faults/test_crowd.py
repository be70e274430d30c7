"""Many threads, many processes, many saves: readers always see a whole checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from states import check, is_whole, listing
from victims import Zygote

pytestmark = pytest.mark.timeout(3600)

TARGETS = ["a.pt", "b.pt", "legacy.pt"]


def read_while(
    zygote: Zygote, folder: Path, read: Callable[[Path], object], processes: int, **job: Any
) -> list[object]:
    """Read the targets over and over while processes save; return what the reads gave."""
    writers = [
        zygote.start(folder, 100_000 * seed, targets=TARGETS, **job)
        for seed in range(1, processes + 1)
    ]
    found: list[object] = []
    while any(writer.is_alive() for writer in writers):
        found += [read(folder / name) for name in TARGETS if (folder / name).exists()]
    for writer in writers:
        assert writer.wait() == 0, writer.ended().err
    return found


@pytest.mark.trials(30, 200)
@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (4, 1)])
def test_crowd(
    processes: int,
    threads: int,
    tmp_path: Path,
    zygote: Zygote,
    counts: Counter[str],
    trials: int,
) -> None:
    numbers = read_while(zygote, tmp_path, check, processes, threads=threads, count=trials)
    assert len(set(numbers)) >= 5, "too few reads between the first save and the last"
    assert listing(tmp_path) == TARGETS
    for name in TARGETS:
        check(tmp_path / name)
    counts["saves"] += processes * threads * trials
    counts["reads beside them, all whole"] += len(numbers)


def test_readers_see_what_is_torn(tmp_path: Path, zygote: Zygote) -> None:
    """The control: stock torch overwrites, and the same readers find torn files."""
    found = read_while(zygote, tmp_path, is_whole, 1, threads=8, count=20, stock=True)
    assert False in found
