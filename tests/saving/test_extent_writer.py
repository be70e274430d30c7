"""A layout is a value: any writers write any parts of it, in any order, into the same file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fcntl import F_GETFL, fcntl
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
import torch

import fastserial
from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.engines import Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.formats.extents import (
    Data,
    DescriptorPatch,
    Extent,
    Literal,
    Trailer,
    clip,
    storage_extents,
)
from fastserial.formats.zip_layout import ZipLayout, ZipPlan
from fastserial.memory.storages import storage_batch, storage_memory
from fastserial.saving import extent_writer
from fastserial.saving.archive import finish_layout
from fastserial.saving.extent_writer import ExtentWriter

SEEDS = range(25)


def storages(random: Random) -> tuple[list[torch.UntypedStorage], list[bytes]]:
    """Empty and very small ones, and some of up to a megabyte; and their bytes."""
    sizes = [random.choice([0, 1, 8, 700, 4096, 65_537, 300_000, 1_000_001]) for _ in range(12)]
    sizes += [40] * random.choice([0, 300])
    random.shuffle(sizes)
    texts = [random.randbytes(size) for size in sizes]
    made = [
        torch.frombuffer(bytearray(text), dtype=torch.uint8).untyped_storage()
        if text
        else torch.UntypedStorage(0)
        for text in texts
    ]
    return made, texts


def zip_plan(random: Random) -> ZipPlan:
    layout = ZipLayout("archive", random.choice([64, 4096]), checksums=random.random() < 0.8)
    layout.add_bytes("data.pkl", b"pickle", crc32(b"pickle"))
    saved, _ = storages(random)
    layout.add_storages([f"data/{index}" for index in range(len(saved))], storage_batch(saved))
    return finish_layout(layout)


def options(random: Random) -> Config:
    return Config(
        block_size=random.choice([4096, 16_384, 65_536, 2 * 1024 * 1024]),
        queue_depth=random.choice([1, 3, 6]),
        threads=random.choice([1, 3]),
        small_file=random.choice([0, 50_000, 10**9]),
        direct=random.choice([False, "auto"]),
    )


def write(
    path: Path, extents: list[Extent], config: Config, ledger: CrcLedger | None, base: int = 0
) -> ExtentWriter:
    """Write on a descriptor that the writer did not open itself."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        out = ExtentWriter(fd, config)
        try:
            out.write(extents, ledger, base)
            out.flush()
        finally:
            out.close()
    finally:
        os.close(fd)
    return out


def ledger_of(plan: ZipPlan) -> CrcLedger:
    return CrcLedger(plan.sizes, plan.crcs)


def ranges(random: Random, nbytes: int, count: int) -> list[tuple[int, int]]:
    """Cut a file at any bytes into `count` ranges, some of them perhaps empty, in any order."""
    cuts = [0, *sorted(random.randint(0, nbytes) for _ in range(count - 1)), nbytes]
    found = list(pairwise(cuts))
    random.shuffle(found)
    return found


LATE = (DescriptorPatch, Trailer)  # what needs the checksums of other extents


@pytest.mark.parametrize("seed", SEEDS)
def test_ranges_of_a_zip_among_writers(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    plan = zip_plan(random)
    write(tmp_path / "whole", plan.extents, options(random), ledger_of(plan))
    everything = ledger_of(plan)
    now = [extent for extent in plan.extents if not isinstance(extent.source, LATE)]
    late = [extent for extent in plan.extents if isinstance(extent.source, LATE)]
    base = random.choice([0, 13, 4096])
    for first, stop in ranges(random, plan.nbytes, random.randint(1, 8)):
        own = ledger_of(plan)
        write(tmp_path / "parts", list(clip(now, first, stop)), options(random), own, base)
        for piece in own.pieces():
            everything.add(*piece)
    random.shuffle(late)
    write(tmp_path / "parts", late, options(random), everything, base)
    assert (tmp_path / "parts").read_bytes()[base:] == (tmp_path / "whole").read_bytes()


def test_a_range_is_written_directly_but_for_its_first_and_last_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = 0

    def note(self: ThreadsEngine, requests: Sequence[Request]) -> None:
        nonlocal direct
        direct += sum(r.length for r in requests if fcntl(r.fd, F_GETFL) & os.O_DIRECT)
        submit(self, requests)

    submit = ThreadsEngine.submit
    monkeypatch.setattr(ThreadsEngine, "submit", note)
    storage = torch.zeros(1_000_000, dtype=torch.uint8).untyped_storage()
    extents = storage_extents(storage_batch([storage]), [b""])
    config = Config(engine="threads", small_file=0, block_size=65_536, cache="drop")
    out = write(tmp_path / "f", extents, config, None, 5000)
    if not out.outcome.direct:
        pytest.skip(f"no direct I/O here: {out.outcome.fallback}")
    assert direct == 1_000_000 - (8192 - 5000) - (1_005_000 % 4096)
    assert out.outcome.engine_bytes + out.outcome.plain_bytes == 1_000_000


def test_a_save_that_is_given_up_waits_for_no_checksum(tmp_path: Path) -> None:
    """A thread has the end of the zip, whose checksums will never be known."""
    plan = next(plan for plan in map(zip_plan, map(Random, SEEDS)) if None in plan.crcs)
    with (tmp_path / "x").open("wb") as file:
        config = Config(engine=partial(ThreadsEngine, prepare_here=False), small_file=0)
        out = ExtentWriter(file.fileno(), config)
        out.write(plan.extents[-1:], ledger_of(plan))
        out._dispatch()
        out.start()
        closing = Thread(target=out.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()


# -- small files, through the page cache ---------------------------------------------------------


def test_checksums_where_writes_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def short(fd: int, data: memoryview, offset: int) -> int:
        return real(fd, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", short)
    noise = Random(7).randbytes(3_000_000)
    storage = torch.frombuffer(bytearray(noise), dtype=torch.uint8).untyped_storage()
    ledger = CrcLedger([len(noise)], [None])
    extents, offset = [], 5
    for source in (
        Literal(b"head"),
        Data(storage_memory(storage), len(noise), 0),
        DescriptorPatch(b"....CRC.", 0, 4),
    ):
        extents.append(Extent(offset, source.length, source))
        offset += source.length
    write(tmp_path / "a", extents, Config(), ledger)
    crc = crc32(noise).to_bytes(4, "little")
    assert (tmp_path / "a").read_bytes() == bytes(5) + b"head" + noise + b"...." + crc


def test_what_another_thread_may_change_is_copied_before_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(500_000)
    real, ended = extent_writer.write_all, Event()

    def late(*arguments: Any) -> None:
        tensor.add_(1)
        real(*arguments)

    monkeypatch.setattr(extent_writer, "write_all", late)
    Thread(target=ended.wait, daemon=True).start()
    try:
        fastserial.save({"x": tensor}, tmp_path / "x.pt")
    finally:
        ended.set()
    assert fastserial.verify(tmp_path / "x.pt").ok
