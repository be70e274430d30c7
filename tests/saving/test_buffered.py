"""Small files: through the page cache, as they lie, or over to blocks when they grow."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial
from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.formats.extents import Data, DescriptorPatch, Extent, ExtentSource, Literal
from fastserial.memory.storages import storage_memory
from fastserial.saving import extent_writer
from fastserial.saving.extent_writer import ExtentWriter

NOISE = random.Random(7).randbytes(3_000_000)


def one_after_another(*sources: ExtentSource) -> list[Extent]:
    extents, offset = [], 0
    for source in sources:
        extents.append(Extent(offset, source.length, source))
        offset += source.length
    return extents


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
        extents = [
            Extent(5 + extent.offset, extent.length, extent.source)
            for extent in one_after_another(*sources)
        ]
        writer = ExtentWriter(file.fileno(), Config())
        writer.write(extents, ledger)
        writer.close()
    crc = crc32(NOISE).to_bytes(4, "little")
    assert (tmp_path / "a").read_bytes() == bytes(5) + b"head" + NOISE + b"...." + crc


def test_what_another_thread_may_change_is_copied_before_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(500_000)
    real, ended = extent_writer.write_all, threading.Event()

    def late(*arguments: Any) -> None:
        tensor.add_(1)
        real(*arguments)

    monkeypatch.setattr(extent_writer, "write_all", late)
    threading.Thread(target=ended.wait, daemon=True).start()
    try:
        fastserial.save({"x": tensor}, tmp_path / "x.pt")
    finally:
        ended.set()
    assert fastserial.verify(tmp_path / "x.pt").ok
