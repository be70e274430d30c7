"""Damaged files: never a crash, a hang or a read outside the file; damage never goes unseen."""

from __future__ import annotations

import contextlib
import os
import random
import resource
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from support.damage import Damaged, damaged, originals

from fastserial.checkpoints.inspect import inspect
from fastserial.checkpoints.verify import verify
from fastserial.checkpoints.verify import zip as zip_check
from fastserial.config import Config
from fastserial.errors import CheckpointFileError, CorruptCheckpointError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_directory

pytestmark = pytest.mark.timeout(3600)

_SMALL = Config(block_size=4096, queue_depth=2, threads=1)
_MOST_READ = 64 << 20  # bytes that verifying and inspecting a file of a few KB may read
_MOST_MEMORY = 1 << 30  # bytes that any one file may make us take


class Watched:
    """A file, and how many bytes were read of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nread = 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watched]:
    """A file that must not be read outside of its bytes."""
    path = tmp_path / "x.pt"
    file = Watched(path)
    real_pread, real_preadv = os.pread, os.preadv

    def within(offset: int, length: int) -> None:
        file.nread += length
        # At the end only a short read tells that there is no more.
        assert 0 <= offset <= path.stat().st_size, f"read at {offset}"
        assert length <= 64 << 20, f"read of {length} bytes"

    def pread(fd: int, length: int, offset: int) -> bytes:
        within(offset, length)
        return real_pread(fd, length, offset)

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        within(offset, sum(map(len, buffers)))
        return real_preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_MEMORY, before[1]))
    yield file
    resource.setrlimit(resource.RLIMIT_AS, before)


def same_content(file: Damaged, whole: dict[str, bytes]) -> bool:
    """Whether torch's reader still gets the same records of an archive; not if it refuses it.

    Headers of other writers have dates, attributes and versions that no checksum covers and torch
    does not look at, and what follows the end of an archive is passed over.
    """
    try:
        return _records(file.data) == _records(whole[file.original])
    except RuntimeError:
        return False


def _records(data: bytes) -> dict[str, bytes]:
    reader = torch._C.PyTorchFileReader(BytesIO(data))
    return {name: reader.get_record(name) for name in reader.get_all_records()}


def test_damage_goes_unseen_without_checksums(
    dice: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: some of the damage is found by nothing but the CRCs."""
    whole, path = originals(), tmp_path / "x.pt"
    files = [damaged({"zip": whole["zip"]}, dice) for _ in range(60)]
    hidden = []
    for file in files:
        path.write_bytes(file.data)
        with monkeypatch.context() as patch:
            patch.setattr(zip_check, "crc_mismatch", lambda found, stored: None)
            blind = verify(path, _SMALL).ok
        if blind and not same_content(file, whole):
            hidden.append(path.read_bytes())
    assert len(hidden) >= 5
    for data in hidden:
        path.write_bytes(data)
        assert not verify(path, _SMALL).ok


@pytest.mark.trials(400, 20_000)
def test_damaged_files(
    watched: Watched, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    whole = originals()
    for data in whole.values():
        watched.path.write_bytes(data)
        assert verify(watched.path, _SMALL).ok
        inspect(watched.path)
    for _ in range(trials):
        file = damaged(whole, dice)
        watched.path.write_bytes(file.data)
        watched.nread = 0
        report = verify(watched.path, _SMALL)
        seen = report.status != "ok"
        with contextlib.suppress(CheckpointFileError):
            inspect(watched.path)
        fd = os.open(watched.path, os.O_RDONLY)
        try:
            for record in read_directory(DescriptorSource(fd), headers=False).records:
                assert 0 < record.data_offset <= record.data_end <= len(file.data)
        except CheckpointFileError:
            pass
        finally:
            os.close(fd)
        assert 0 < watched.nread < _MOST_READ, file.what
        if file.must_be_found:
            assert seen or same_content(file, whole), (file.what, report)
        found = "reported" if seen else "not reported: no checksum has it"
        counts[f"{'legacy' if file.original == 'legacy' else 'zip'}: {found}"] += 1


def test_a_sparse_terabyte(watched: Watched) -> None:
    """The size of the file itself is no reason to take memory, or to read for hours."""
    data = originals()["zip"]
    watched.path.write_bytes(data[:-200])
    os.truncate(watched.path, 1 << 40)
    assert not verify(watched.path).ok
    with pytest.raises(CorruptCheckpointError):
        inspect(watched.path)
    assert 0 < watched.nread < _MOST_READ
