"""Cold files, read in lanes: the order, and what comes of it."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.corpus import MIB, noise
from support.identity import digest, fast, stock

import fastserial
from fastserial.files import linux
from fastserial.loading import pump
from fastserial.loading.pump import in_turns, lane_of
from fastserial.patching import load_hooks


class Place(NamedTuple):
    offset: int


def _index(read: list[Place | None], nth: int) -> int:
    return [at for at, place in enumerate(read) if place is None][nth]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("stops", [False, True])
def test_each_lane_is_read_in_order(
    count: int, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "LANE_SPAN", 100)
    chance = random.Random(count)
    places = [Place(at) for at in sorted(chance.sample(range(3000), 200))]
    given: list[Place | None] = []
    for place in places:
        given.append(place)
        if stops and chance.random() < 0.1:
            given.append(None)
    read = list(in_turns(given, count))
    found = [place for place in read if place is not None]
    for stop in (at for at, place in enumerate(given) if place is None):
        assert set(read[: _index(read, given[:stop].count(None))]) >= set(given[:stop])
    assert sorted(found) == places
    for lane in range(count):
        mine = [place for place in found if lane_of(place.offset, count) == lane]
        assert mine == sorted(mine)


def cold(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("fmt", ["zip", "legacy"])
@pytest.mark.parametrize("descriptors", [0, 1, 9])
def test_cold_loads(
    fmt: str, descriptors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a descriptor for each lane, with too few, and with none."""
    path = tmp_path / "f.pt"
    value = {"large": noise(5 * MIB), **{f"w{i}": noise(90_000 + i * 7) for i in range(40)}}
    with stock():
        torch.save(value, path, _use_new_zipfile_serialization=fmt == "zip")
        want = digest(torch.load(path))
    monkeypatch.setattr(pump, "LANE_SPAN", MIB)
    monkeypatch.setattr(load_hooks, "FEW_LEGACY_BYTES", 0)
    reopen, opened = linux.reopen, []

    def limited(fd: int, flags: int, files: Any) -> int:
        if len(opened) == descriptors + 1:  # the first is for the file itself
            raise OSError(errno.EMFILE, "Too many open files")
        opened.append(fd)
        return reopen(fd, flags, files)

    monkeypatch.setattr(linux, "reopen", limited)
    cold(path)
    with fast(small_file=0, block_size=65536, cache="keep"):
        assert digest(torch.load(path)) == want
        report = fastserial.last_load_report()
    assert report is not None
    assert (report.engine, report.direct_bytes) == ("threads", 0)
    assert len(opened) == 1 + min(descriptors, pump.LANES)
