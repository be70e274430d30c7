"""The zip layout against torch's own writer, over what real checkpoints cannot easily reach."""

from __future__ import annotations

import ctypes
import random
import zlib

import pytest
import torch

from fastserial.checksums import CrcLedger
from fastserial.formats.extents import Data, Extent, Literal, Trailer
from fastserial.formats.zip_layout import ZipLayout
from fastserial.memory.buffers import own_buffer
from fastserial.memory.storages import Batch, HostMemory
from fastserial.patching import self_check
from fastserial.saving.archive import PieceSink, finish_layout, has_alignment
from fastserial.saving.fill import fill

HAS_ALIGNMENT = has_alignment()
ALIGNMENTS = [1, 7, 64, 512, 4096, 32768] if HAS_ALIGNMENT else [64]
U32 = 0xFFFFFFFF


def theirs(records: list[tuple[str, bytes | int]], alignment: int, crc: bool = True) -> PieceSink:
    sink = PieceSink()
    more = (alignment,) if HAS_ALIGNMENT else ()
    writer = torch._C.PyTorchFileWriter(sink, crc, *more)
    for name, data in records:
        if isinstance(data, int):
            writer.write_record_metadata(name, data)
        else:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return sink


def ours(records: list[tuple[str, bytes | int]], alignment: int, crc: bool = True) -> PieceSink:
    layout = ZipLayout("archive", alignment, crc)
    for name, data in records:
        if isinstance(data, int):
            layout.add_memory(name, HostMemory(0, data, None), b"", crc=0)
        else:
            layout.add_bytes(name, data, zlib.crc32(data))
    plan = finish_layout(layout)
    sink = PieceSink()
    end = 0
    for extent in plan.extents:
        assert extent.offset == end, "a gap or an overlap between extents"
        end += extent.length
        text = content(extent, [known or 0 for known in plan.crcs])
        if text is not None:
            sink.seek(extent.offset)
            sink.write(text)
    assert plan.nbytes == end
    return sink


def content(extent: Extent, crcs: list[int]) -> bytes | None:
    source = extent.source
    if isinstance(source, Literal):
        text = bytes(source.data)
    elif isinstance(source, Trailer):
        text = source.data(crcs)
    else:
        return None  # a hole
    assert len(text) == extent.length
    return text


@pytest.mark.parametrize("seed", range(40))
def test_equals_torch(seed: int) -> None:
    rnd = random.Random(seed)
    records: list[tuple[str, bytes | int]] = [("data.pkl", rnd.randbytes(rnd.randrange(300)))]
    for index in range(rnd.randrange(40)):
        kind = rnd.random()
        if kind < 0.25:
            data: bytes | int = rnd.choice([U32 + 1, U32, U32 - 1, 5 << 30, 0, 100])
        else:
            data = rnd.randbytes(rnd.choice([0, 1, 4, 7, 8, 100, 4096]))
            if kind > 0.8:
                data = b"PK\x07\x08" + data
        records.append((f"data/{index}", data))
    alignment = rnd.choice(ALIGNMENTS)
    assert ours(records, alignment).pieces == theirs(records, alignment).pieces


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_storages_in_one_go(seed: int, crc: bool) -> None:
    """Small and large, empty and quirky ones, before and behind 4 GiB, laid out and filled."""
    rnd = random.Random(seed)
    far = rnd.choice([0, U32 - rnd.randrange(200_000), U32])
    texts: list[bytes] = []
    for _ in range(rnd.choice([1, 10, 60])):
        length = rnd.choice([0, 1, 4, 7, 8, 100, 100, 4096, 9000, 70_000])
        texts.append(rnd.choice([b"", b"", b"PK\x07\x08"]) + rnd.randbytes(length))
    names = [f"data/{index}" for index in range(len(texts))]
    first: list[tuple[str, bytes | int]] = [("data.pkl", b"abc"), ("hole", far)]
    alignment = rnd.choice(ALIGNMENTS)

    layout = ZipLayout("archive", alignment, crc)
    layout.add_bytes("data.pkl", b"abc", zlib.crc32(b"abc"))
    hole = HostMemory(0, far, None)
    layout.add_memory("hole", hole, b"", crc=0)
    buffers = [ctypes.create_string_buffer(text, len(text)) if text else None for text in texts]
    addresses = [ctypes.addressof(buffer) if buffer is not None else 0 for buffer in buffers]
    memories = [HostMemory(*pair, None) for pair in zip(addresses, map(len, texts), strict=True)]
    if rnd.random() < 0.3:  # as if they were on a device
        addresses = [0] * len(texts)
    layout.add_storages(names, Batch(addresses, [len(t) for t in texts], memories.__getitem__))
    plan = finish_layout(layout)
    ledger = CrcLedger(plan.sizes, plan.crcs)
    sink = PieceSink()
    for extent in plan.extents:
        sink.seek(extent.offset)
        if not (isinstance(extent.source, Data) and extent.source.memory is hole):
            buffer = own_buffer(max(1, extent.length))
            fill([extent], ledger, buffer.view, buffer.address)
            sink.write(buffer.view[: extent.length])

    records = [*first, *zip(names, texts, strict=True)]
    assert sink.pieces == theirs(records, alignment, crc).pieces


def test_header_just_before_4_gib() -> None:
    for distance in range(0, 200, 8):
        records: list[tuple[str, bytes | int]] = [("data/0", U32 - distance), ("data/1", b"x")]
        assert ours(records, 64).pieces == theirs(records, 64).pieces


def test_more_records_than_16_bits() -> None:
    records: list[tuple[str, bytes | int]] = [(f"data/{i}", b"") for i in range(66_000)]
    assert ours(records, 64).pieces == theirs(records, 64).pieces


def test_self_check_notices_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserial.formats.zip_layout._MADE_BY", 0x0314)
    reason = self_check.self_check()
    assert reason is not None
    assert torch.__version__ in reason
