"""What tells whether bytes were written, when nobody reports it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserial.engines.deepspeed.engine import is_blank, is_written

PAGE = mmap.PAGESIZE


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def has_holes(fd: int) -> bool:
    return is_blank(fd, 0, PAGE)


@pytest.mark.parametrize("reserve", [False, True])
def test_written_is_told_from_reserved(fd: int, reserve: bool) -> None:
    """Reserved space counts as unwritten, block by block."""
    if not has_holes(fd):
        pytest.skip("the file system has no holes")
    length = 8 * PAGE
    if reserve:
        os.posix_fallocate(fd, 0, length)
    assert is_blank(fd, 0, length)
    assert not is_written(fd, 0, length)
    os.pwrite(fd, b"x" * PAGE, 3 * PAGE)
    os.fsync(fd)
    assert not is_blank(fd, 0, length)
    assert is_blank(fd, 4 * PAGE, PAGE)
    assert is_written(fd, 3 * PAGE, PAGE)
    assert not is_written(fd, 3 * PAGE, 2 * PAGE)
    for at in (0, 1, 2, 4, 5, 6, 7):
        assert not is_written(fd, 0, length)
        os.pwrite(fd, b"x" * PAGE, at * PAGE)
    os.fsync(fd)
    assert is_written(fd, 0, length)


def test_the_end_is_not_a_hole(fd: int) -> None:
    """Beyond the end space is reserved; the file never becomes shorter, whoever else extends it."""
    assert is_blank(fd, 0, 2 * PAGE)
    assert os.fstat(fd).st_size == 2 * PAGE
    assert not is_written(fd, 4 * PAGE, PAGE)
    os.pwrite(fd, b"x" * PAGE, 6 * PAGE)
    assert is_blank(fd, 4 * PAGE, PAGE)
    assert os.fstat(fd).st_size == 7 * PAGE
