"""CRC-32s of parts of a file, however it is read."""

from __future__ import annotations

import os
import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import bad_sectors

from fastserial.checkpoints.verify.zip import FilePart, Span
from fastserial.config import Config

DATA = random.Random(1).randbytes(300_000)


def checksums(path: Path, spans: list[Span], config: Config, start: int = 0) -> list[object]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return list(FilePart(fd, str(path), config, start).checksums(spans))
    finally:
        os.close(fd)


def expected(spans: list[Span], start: int = 0) -> list[int]:
    return [zlib.crc32(DATA[start + at : start + at + nbytes]) for at, nbytes in spans]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checksums") / "x"
    path.write_bytes(DATA)
    return path


@given(
    cuts=st.lists(st.integers(0, len(DATA) - 5000), max_size=40, unique=True),
    start=st.sampled_from([0, 1, 4096, 4999]),
    block_size=st.sampled_from([4096, 65536, 1 << 20]),
    threads=st.sampled_from([1, 4]),
    depth=st.integers(1, 5),
    direct=st.sampled_from(["auto", True, False]),
    cold=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_spans(
    path: Path,
    cuts: list[int],
    start: int,
    block_size: int,
    threads: int,
    depth: int,
    direct: bool | str,
    cold: bool,
) -> None:
    """Neighbours or with bytes between them, from the first byte of the file or of a part of it."""
    if cold:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ends = sorted(cuts)
    spans = [(a, b - a) for a, b in pairwise(ends) if (a + b) % 3]
    config = Config(block_size=block_size, threads=threads, queue_depth=depth, direct=direct)  # type: ignore[arg-type]
    assert checksums(path, spans, config, start) == expected(spans, start)


@pytest.mark.parametrize("block_size", [4096, 1 << 20])
def test_what_cannot_be_read(block_size: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [(0, 100_000), (100_000, 100_000), (250_000, 0), (250_000, 50_000)]
    bad_sectors(monkeypatch, 150_000)
    first, second, *rest = checksums(path, spans, Config(block_size=block_size))
    assert isinstance(second, OSError)
    assert [first, *rest] == expected([spans[0], *spans[2:]])


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_becomes_shorter(direct: bool, tmp_path: Path) -> None:
    copy = tmp_path / "x"
    copy.write_bytes(DATA)
    fd = os.open(copy, os.O_RDONLY)
    try:
        part = FilePart(fd, str(copy), Config(block_size=4096, direct=direct))
        os.truncate(copy, 150_000)
        assert part.checksums([(140_000, 100_000)]) == [None]
    finally:
        os.close(fd)
