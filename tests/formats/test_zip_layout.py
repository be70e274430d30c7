"""The zip layout against torch's own writer, over what real checkpoints cannot easily reach."""

from __future__ import annotations

import ctypes
import random
import zlib

import pytest
import torch

from fastserial.checksums import CrcLedger
from fastserial.formats.extents import Data
from fastserial.formats.zip_layout import ZipLayout
from fastserial.memory.buffers import own_buffer
from fastserial.memory.storages import Batch, HostMemory
from fastserial.patching import self_check
from fastserial.saving.archive import PieceSink, finish_layout, has_alignment
from fastserial.saving.fill import fill

ALIGNMENTS = [1, 7, 64, 512, 4096, 32768] if has_alignment() else [64]
SIZES = [0, 1, 4, 7, 8, 100, 100, 4096, 9000, 70_000]
U32 = 0xFFFFFFFF
# A name and its bytes, or the length of a hole.
Record = tuple[str, bytes | int]


def theirs(records: list[Record], alignment: int = 64, crc: bool = True) -> PieceSink:
    sink = PieceSink()
    more = (alignment,) if has_alignment() else ()
    writer = torch._C.PyTorchFileWriter(sink, crc, *more)
    for name, data in records:
        if isinstance(data, int):
            writer.write_record_metadata(name, data)
        else:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return sink


def ours(
    records: list[Record],
    alignment: int = 64,
    crc: bool = True,
    in_one_go: int = 0,
    on_device: bool = False,
) -> PieceSink:
    """Lay out and fill; the last `in_one_go` records are storages, added in one call."""
    layout = ZipLayout("archive", alignment, crc)
    holes: list[HostMemory] = []
    for name, data in records[: len(records) - in_one_go]:
        if isinstance(data, int):
            holes.append(HostMemory(0, data, None))
            layout.add_memory(name, holes[-1], b"", crc=0)
        else:
            layout.add_bytes(name, data, zlib.crc32(data))
    storages = [(name, bytes(data)) for name, data in records[len(records) - in_one_go :]]
    buffers = [
        ctypes.create_string_buffer(text, len(text)) if text else None for _, text in storages
    ]
    addresses = [ctypes.addressof(buffer) if buffer else 0 for buffer in buffers]
    sizes = [len(text) for _, text in storages]
    memories = [HostMemory(*pair, None) for pair in zip(addresses, sizes, strict=True)]
    if on_device:
        addresses = [0] * len(storages)
    batch = Batch(addresses, sizes, memories.__getitem__)
    layout.add_storages([name for name, _ in storages], batch)
    plan = finish_layout(layout)
    ledger, sink, end = CrcLedger(plan.sizes, plan.crcs), PieceSink(), 0
    for extent in plan.extents:
        assert extent.offset == end, "a gap or an overlap between extents"
        end += extent.length
        if not (isinstance(extent.source, Data) and extent.source.memory in holes):
            sink.seek(extent.offset)
            buffer = own_buffer(max(1, extent.length))
            fill([extent], ledger, buffer.view, buffer.address)
            sink.write(buffer.view[: extent.length])
    assert plan.nbytes == end
    return sink


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_equals_torch(seed: int, crc: bool) -> None:
    """Small and large, empty and quirky records, before and behind 4 GiB."""
    dice = random.Random(seed)
    records: list[Record] = [("data.pkl", dice.randbytes(dice.randrange(300)))]
    in_one_go = dice.choice([0, 0, 10, 60, 60])
    if in_one_go:  # 4 GiB lie among them
        count, share, holes = 1, 0.9, [U32 - dice.randrange(200_000)]
    else:
        count, share, holes = dice.randrange(40), 0.25, [U32 + 1, U32, U32 - 1, 5 << 30, 100]
    for index in range(count + in_one_go):
        data = dice.choice([b"", b"", b"", b"PK\x07\x08"]) + dice.randbytes(dice.choice(SIZES))
        is_hole = index < count and dice.random() < share
        records.append((f"data/{index}", dice.choice(holes) if is_hole else data))
    alignment = dice.choice(ALIGNMENTS)
    found = ours(records, alignment, crc, in_one_go, on_device=dice.random() < 0.3)
    assert found.pieces == theirs(records, alignment, crc).pieces


def test_header_just_before_4_gib() -> None:
    for distance in range(0, 200, 8):
        records: list[Record] = [("data/0", U32 - distance), ("data/1", b"x")]
        assert ours(records).pieces == theirs(records).pieces


def test_more_records_than_16_bits() -> None:
    records: list[Record] = [(f"data/{i}", b"") for i in range(66_000)]
    assert ours(records).pieces == theirs(records).pieces


def test_self_check_notices_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserial.formats.zip_layout._MADE_BY", 0x0314)
    reason = self_check.self_check()
    assert reason is not None
    assert torch.__version__ in reason
