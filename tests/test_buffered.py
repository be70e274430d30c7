"""Small files: through the page cache, as they lie, or over to blocks when they grow."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastserial import buffered
from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.containers.extents import Data, Literal, Sealed
from fastserial.staging import storage_memory
from fastserial.transfer import BlockWriter, Part, staged

NOISE = random.Random(7).randbytes(3_000_000)


def put(path: Path, config: Config, action: Callable[[BlockWriter], None]) -> BlockWriter:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        blocks = BlockWriter(fd, 0, config)
        try:
            action(blocks)
            blocks.finish()
        finally:
            blocks.close()
    finally:
        os.close(fd)
    return blocks


@pytest.mark.parametrize("later", [1, 99_990, 200_000, 1_000_000])
@pytest.mark.parametrize("settled", [False, True])
def test_a_file_may_grow_beyond_what_was_expected(
    tmp_path: Path, later: int, settled: bool
) -> None:
    storage = torch.frombuffer(bytearray(NOISE[:70_000]), dtype=torch.uint8).untyped_storage()

    def action(blocks: BlockWriter) -> None:
        blocks.expect(70_010)
        blocks.put(Literal(NOISE[:10]))
        blocks.put(Data(storage_memory(storage), 70_000, None))
        if settled:
            blocks.settle()
            storage.fill_(0)
        blocks.put(Literal(NOISE[:later]))

    config = Config(small_file=100_000, block_size=65536, queue_depth=2, threads=2)
    blocks = put(tmp_path / "a", config, action)
    expected = NOISE[:10] + NOISE[:70_000] + NOISE[:later]
    assert (tmp_path / "a").read_bytes() == expected
    assert (blocks.engine_name == "buffered") == (len(expected) <= 100_000)


def test_small_in_bytes_but_larger_than_a_block(tmp_path: Path) -> None:
    def action(blocks: BlockWriter) -> None:
        blocks.expect(300_000)
        blocks.put(Literal(NOISE[:300_000]))

    blocks = put(tmp_path / "a", Config(block_size=4096), action)
    assert blocks.engine_name == "buffered"
    assert (tmp_path / "a").read_bytes() == NOISE[:300_000]


def test_checksums_of_what_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, pieces: Any, offset: int) -> int:
        first = bytes(pieces[0])
        return real(fd, [first[: max(1, len(first) // 2)]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    storage = torch.frombuffer(bytearray(NOISE), dtype=torch.uint8).untyped_storage()
    ledger = CrcLedger([len(NOISE)], [None])
    sources = [
        Literal(b"head"),
        Data(storage_memory(storage), len(NOISE), 0),
        Sealed(b"....CRC.", 0, 4),
    ]
    with (tmp_path / "a").open("wb") as file:
        parts = [Part(source, 0, source.length, ledger) for source in sources]
        buffered.write_buffered(file.fileno(), parts, 5, staged)
    crc = crc32(NOISE).to_bytes(4, "little")
    assert (tmp_path / "a").read_bytes() == bytes(5) + b"head" + NOISE + b"...." + crc


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with (tmp_path / "a").open("wb") as file, pytest.raises(OSError, match="3 bytes were not"):
        buffered.write_all(file.fileno(), [memoryview(b"abc")], 0)
