"""Bytes of a file, of a part of one and in memory are read alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastserial.errors import TruncatedCheckpointError
from fastserial.formats.container import format_of_head
from fastserial.formats.source import BytesSource, DescriptorSource, Source

DATA = bytes(range(200))


def in_memory(data: bytes, path: Path) -> Source:
    return BytesSource(data)


def file(data: bytes, path: Path) -> Source:
    path.write_bytes(data)
    return DescriptorSource(os.open(path, os.O_RDONLY))


def part(data: bytes, path: Path) -> Source:
    path.write_bytes(b"before" + data + b"behind")
    return DescriptorSource(os.open(path, os.O_RDONLY), len(b"before"), len(data))


KINDS = pytest.mark.parametrize("kind", [in_memory, file, part])
Kind = Callable[[bytes, Path], Source]


@KINDS
def test_any_bytes_and_no_others(kind: Kind, tmp_path: Path) -> None:
    source = kind(DATA, tmp_path / "x")
    assert source.size == len(DATA)
    for offset, nbytes in ((0, 0), (0, 200), (7, 50), (199, 1), (200, 0)):
        assert source.read_at(offset, nbytes) == DATA[offset : offset + nbytes]
    for offset, nbytes in ((0, 201), (199, 2), (201, 0), (-1, 1), (5, -1), (1 << 63, 1)):
        with pytest.raises(TruncatedCheckpointError):
            source.read_at(offset, nbytes)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    source = file(DATA, tmp_path / "x")
    os.truncate(tmp_path / "x", 100)
    assert source.read_at(99, 1) == DATA[99:100]
    with pytest.raises(TruncatedCheckpointError, match="byte 100"):
        source.read_at(50, 100)


def test_a_file_that_is_emptied_meanwhile_is_no_checkpoint(tmp_path: Path) -> None:
    """As a log in a folder whose checkpoints are looked for."""
    path = tmp_path / "f.log"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file:
        source = DescriptorSource(file.fileno(), size=4096)
        file.truncate(3)
        assert format_of_head(source) is None
