"""FastFileReader: the bytes of a file in memory, whatever the way they take."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastserial.config import Config
from fastserial.engines import Capabilities, Request, threads
from fastserial.engines.threads import ThreadsEngine, transfer
from fastserial.errors import CorruptCheckpointError
from fastserial.files import linux
from fastserial.loading import pump
from fastserial.loading.reader import FastFileReader, HostSink, ReadExtent
from fastserial.memory.storages import new_storage

SIZE = 9_456_789


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    file = tmp_path / "file.bin"
    file.write_bytes(data)
    return file


def chill(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def host(nbytes: int, offset: int | None = None) -> tuple[HostSink, torch.UntypedStorage]:
    """Memory, with an offset at the same distance from a multiple of 4096 as that in the file."""
    whole = new_storage(nbytes + 4096)
    at = 0 if offset is None else (offset - whole.data_ptr()) % 4096
    storage: Any = whole[at : at + nbytes]
    return HostSink(storage.data_ptr(), nbytes, storage), storage


def content(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


# --- extents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_random_extents(path: Path, data: bytes, seed: int) -> None:
    rng = random.Random(seed)
    config = Config(
        block_size=rng.choice([4096, 65536, 1 << 20, 4 << 20]),
        queue_depth=rng.choice([1, 3, 8]),
        threads=rng.choice([1, 4]),
        direct=rng.choice(["auto", True, False]),
        small_file=0,
    )
    if seed % 2:
        chill(path)
    wanted: list[tuple[int, int, torch.UntypedStorage]] = []
    extents: list[ReadExtent] = []
    for _ in range(rng.choice([1, 5, 40])):
        offset = rng.randrange(SIZE)
        length = min(SIZE - offset, rng.choice([0, 1, 100, 5000, 70_000, 3_000_000, SIZE]))
        sink, storage = host(length, rng.choice([offset, None]))
        wanted.append((offset, length, storage))
        extents.append(ReadExtent(offset, length, sink))
    with FastFileReader(path, config) as reader:
        reader.read_into(extents)
        counts = reader.blocks.counts
        if config.direct is False:
            assert counts.direct == 0
    for offset, length, storage in wanted:
        assert content(storage) == data[offset : offset + length], (offset, length)


@pytest.mark.parametrize("direct", [True, False])
def test_a_large_hole_is_not_read(path: Path, data: bytes, direct: bool) -> None:
    (first, one), (second, other) = host(4096), host(4096)
    reads = [ReadExtent(0, 4096, first), ReadExtent(1 << 20, 4096, second)]
    with FastFileReader(path, Config(direct=direct, small_file=0, block_size=4 << 20)) as reader:
        reader.read_into(reads)
        counts = reader.blocks.counts
    assert counts.direct + counts.cached < 1 << 18
    assert content(one) + content(other) == data[:4096] + data[1 << 20 :][:4096]


def test_outside_the_file(path: Path) -> None:
    sink, _ = host(10)
    with FastFileReader(path) as reader:
        for offset, length in ((SIZE - 5, 10), (SIZE + 1, 1), (-1, 5), (2**62, 2**62)):
            with pytest.raises(CorruptCheckpointError, match=r"file\.bin"):
                reader.read_into([ReadExtent(offset, length, sink)])
    with pytest.raises(ValueError, match="closed"):
        reader.read_into([])


# --- blocks -------------------------------------------------------------------------------------


def test_direct_reads_that_are_refused(
    path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems take the flag and refuse the read."""
    real = threads.transfer

    def refusing(request: Any, done: int = 0) -> int:
        if os.O_DIRECT & _flags(request.fd):
            refused.append(request)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(request, done)

    refused: list[Any] = []
    monkeypatch.setattr(threads, "transfer", refusing)
    monkeypatch.setattr(linux, "_refusing", set())
    forced: dict[str, Any] = {"small_file": 0, "block_size": 65536, "cache": "drop"}
    for direct, asked in ((True, True), ("auto", False), (True, True)):  # a wish is one
        sink, storage = host(SIZE)
        refused.clear()
        with FastFileReader(path, Config(direct=direct, **forced)) as reader:
            if reader.blocks.fallback is not None:
                pytest.skip("no direct I/O here")
            reader.read_into([ReadExtent(0, SIZE, sink)])
            assert ("refused" in str(reader.blocks.fallback)) is asked
            assert reader.blocks.counts.direct == 0
        assert content(storage) == data
        assert bool(refused) is asked


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


class FailsThenWaits(ThreadsEngine):
    """An engine whose first read fails while the others take their time."""

    name = "late"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._move = self.late

    @staticmethod
    def late(request: Request) -> int:
        if request.offset == 0:
            raise OSError(errno.EIO, "the disk failed")
        time.sleep(0.3)
        return transfer(request)


def test_no_read_outlasts_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is its owner's again, or torch's; the error has errno and file name."""
    monkeypatch.setattr(pump, "create", lambda name, count: FailsThenWaits(count))
    sink, storage = host(SIZE)
    config = Config(direct=True, small_file=0, block_size=1 << 20)
    with FastFileReader(path, config) as reader:
        with pytest.raises(OSError, match="the disk failed") as caught:
            reader.read_into([ReadExtent(0, SIZE, sink)])
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
        storage.fill_(0)
        time.sleep(0.6)
        assert content(storage) == bytes(SIZE)


class OwnBuffers(ThreadsEngine):
    """An engine that reads into its own buffers only."""

    name = "own"
    capabilities = Capabilities(any_memory=False)

    def submit(self, requests: Any) -> None:
        for request in requests:
            assert any(request.buffer is one for one in self.mine)
        super().submit(requests)

    def open(self, buffers: Any, queue_depth: int) -> None:
        self.mine = list(buffers)
        super().open(buffers, queue_depth)


def test_engines_with_own_buffers(path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "create", lambda name, count: OwnBuffers(count))
    sink, storage = host(SIZE)
    for direct in (True, False):
        config = Config(direct=direct, small_file=0, block_size=65536, queue_depth=2)
        with FastFileReader(path, config) as reader:
            assert not reader.blocks.takes_any_memory
            reader.read_into([ReadExtent(0, SIZE, sink)])
        assert content(storage) == data
