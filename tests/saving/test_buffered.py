"""Small files: through the page cache, as they lie, or over to blocks when they grow."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.config.performance import FILL_CHUNK
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Source
from fastserial.memory.storages import storage_memory
from fastserial.saving import fill
from fastserial.saving.extent_writer import ExtentWriter
from fastserial.saving.fill import ExtentPart

NOISE = random.Random(7).randbytes(3_000_000)


def one_after_another(*sources: Source) -> list[Extent]:
    extents, offset = [], 0
    for source in sources:
        extents.append(Extent(offset, source.length, source))
        offset += source.length
    return extents


def put(path: Path, config: Config, action: Callable[[ExtentWriter], None]) -> ExtentWriter:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        out = ExtentWriter(fd, config)
        try:
            action(out)
            out.finish()
        finally:
            out.close()
    finally:
        os.close(fd)
    return out


@pytest.mark.parametrize("later", [1, 99_990, 200_000, 1_000_000])
@pytest.mark.parametrize("settled", [False, True])
def test_a_file_may_grow_beyond_what_was_expected(
    tmp_path: Path, later: int, settled: bool
) -> None:
    storage = torch.frombuffer(bytearray(NOISE[:70_000]), dtype=torch.uint8).untyped_storage()

    def action(out: ExtentWriter) -> None:
        out.expect(70_010)
        data = Data(storage_memory(storage), 70_000, None)
        out.write(one_after_another(Literal(NOISE[:10]), data))
        if settled:
            out.release_sources()
            storage.fill_(0)
        out.write(one_after_another(Literal(NOISE[:later])), base=70_010)

    config = Config(small_file=100_000, block_size=65536, queue_depth=2, threads=2)
    out = put(tmp_path / "a", config, action)
    expected = NOISE[:10] + NOISE[:70_000] + NOISE[:later]
    assert (tmp_path / "a").read_bytes() == expected
    assert (out.outcome.engine == "buffered") == (len(expected) <= 100_000)


def test_what_is_held_for_later_is_held_in_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python keeps its lock while it makes room for one: training would stand still."""
    pieces: list[int] = []
    staged = fill.staged

    def note(parts: Sequence[ExtentPart]) -> bytearray:
        pieces.append(sum(part.length for part in parts))
        return staged(parts)

    monkeypatch.setattr(fill, "staged", note)
    size = 5 * FILL_CHUNK + 4321
    content = (NOISE * (size // len(NOISE) + 1))[:size]
    storage = torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()

    def action(out: ExtentWriter) -> None:
        data = Data(storage_memory(storage), size, None)
        out.write(one_after_another(Literal(NOISE[:10]), data))
        out.release_sources()
        storage.fill_(0)
        out.write(one_after_another(Literal(b"end")), base=10 + size)

    put(tmp_path / "a", Config(small_file=0, block_size=8 * FILL_CHUNK), action)
    assert (tmp_path / "a").read_bytes() == NOISE[:10] + content + b"end"
    assert sum(pieces) == size
    assert max(pieces) <= FILL_CHUNK


def test_small_in_bytes_but_larger_than_a_block(tmp_path: Path) -> None:
    def action(out: ExtentWriter) -> None:
        out.expect(300_000)
        out.write(one_after_another(Literal(NOISE[:300_000])))

    out = put(tmp_path / "a", Config(block_size=4096), action)
    assert out.outcome.engine == "buffered"
    assert (tmp_path / "a").read_bytes() == NOISE[:300_000]


def test_checksums_where_writes_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def short(fd: int, data: Any, offset: int) -> int:
        return real(fd, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", short)
    storage = torch.frombuffer(bytearray(NOISE), dtype=torch.uint8).untyped_storage()
    ledger = CrcLedger([len(NOISE)], [None])
    sources = [
        Literal(b"head"),
        Data(storage_memory(storage), len(NOISE), 0),
        DescriptorPatch(b"....CRC.", 0, 4),
    ]
    with (tmp_path / "a").open("wb") as file:
        parts = [
            ExtentPart(5 + extent.offset, extent.source, 0, extent.length, ledger)
            for extent in one_after_another(*sources)
        ]
        fill.write_buffered(file.fileno(), parts)
    crc = crc32(NOISE).to_bytes(4, "little")
    assert (tmp_path / "a").read_bytes() == bytes(5) + b"head" + NOISE + b"...." + crc


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with (tmp_path / "a").open("wb") as file, pytest.raises(OSError, match="3 bytes were not"):
        fill.write_all(file.fileno(), memoryview(b"abc"), 0)
