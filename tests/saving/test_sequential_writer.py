"""A zip archive through somebody else's FastFileWriter, by its sequential interface."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.corpus import CASES, MIB, Case, noise
from support.identity import difference, fast, stock

from fastserial.reports import SAVES
from fastserial.saving.sequential_writer import SequentialWriter


class Theirs:
    """Speaks the protocol of DeepSpeed's FastFileWriter, and keeps a note of each call."""

    def __init__(self, writers: int = 1) -> None:
        self.data = bytearray()
        self.writes: list[int] = []
        self.storages: list[int] = []
        self._num_parallel_writers = writers

    def write(self, buffer: Any) -> int:
        self.data += buffer
        self.writes.append(len(buffer))
        return len(buffer)

    def save_torch_storage_object_list(
        self, storage_obj_list: Sequence[tuple[torch.UntypedStorage, torch.dtype]], save_size: bool
    ) -> int:
        before = len(self.data)
        for storage, dtype in storage_obj_list:
            if save_size:
                count = storage.nbytes() // dtype.itemsize
                self.data += count.to_bytes(8, "little")
            self.data += ctypes.string_at(storage.data_ptr(), storage.nbytes())
            self.storages.append(storage.nbytes())
        return len(self.data) - before

    def flush(self) -> None:
        pass


def cases(fmt: str) -> list[Any]:
    """What can be saved. Under `skip_data` torch wants to seek, and such a writer cannot."""
    return [
        pytest.param(case, id=case.name)
        for case in CASES.values()
        if fmt in case.formats and fmt not in case.raises and not case.large
        if case.missing() is None and "skip" not in case.name
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", cases("zip"))
def test_stock_bytes(case: Case) -> None:
    """The corpus, against what stock puts into a file object."""
    live = case.build()
    expected, theirs = io.BytesIO(), Theirs()
    with stock(), case.context():
        torch.save(live, expected, **case.options("zip"))
    if case.rebuild:
        live = case.build()
    with fast(), case.context():
        torch.save(live, theirs, **case.options("zip"))
    assert difference(expected.getvalue(), bytes(theirs.data)) is None


def test_storages_are_handed_over() -> None:
    """Large storages uncopied, the rest in few writes; and `summary()` counts the save."""
    state = {f"w{i}": noise(MIB + i) for i in range(5)} | {f"s{i}": noise(100) for i in range(500)}
    theirs = Theirs()
    SAVES.clear()
    with fast():
        torch.save(state, theirs)
    assert (SAVES.count, SAVES.by_torch, SAVES.nbytes) == (1, 0, len(theirs.data))
    assert theirs.storages == [MIB + i for i in range(5)]
    assert len(theirs.writes) <= 6
    assert torch.load(io.BytesIO(theirs.data))["w4"].equal(state["w4"])


def test_a_legacy_save_counts_once() -> None:
    """As fastserial's: the storages are handed over in one call, like those of a zip archive."""
    state = {f"w{i}": noise(MIB + i) for i in range(5)}
    theirs = Theirs()
    SAVES.clear()
    with fast():
        torch.save(state, theirs, _use_new_zipfile_serialization=False)
    assert len(theirs.storages) == 5
    assert (SAVES.count, SAVES.by_torch, SAVES.nbytes) == (1, 0, sum(theirs.storages))


def test_one_of_several_writers_gets_everything() -> None:
    """A storage list would be cut into shares: torch's own way writes it all."""
    tensor = noise(MIB)
    theirs = Theirs(writers=2)
    with fast():
        torch.save(tensor, theirs)
    assert theirs.storages == []
    assert torch.load(io.BytesIO(theirs.data)).equal(tensor)


def test_only_writers_are_taken() -> None:
    assert SequentialWriter.accepts(Theirs())
    assert not SequentialWriter.accepts(io.BytesIO())
    assert not SequentialWriter.accepts("path")


_RESIZED = """
import threading, torch, fastserial
class Theirs:
    def write(self, data): return len(data)
    def flush(self): pass
    def save_torch_storage_object_list(self, storages, save_size=True):
        other = threading.Thread(target=storage.resize_, args=(0,))
        other.start(); other.join()
threading.Thread(target=threading.Event().wait, daemon=True).start()
storage = torch.UntypedStorage(64 << 20)
tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
fastserial.install()
try:
    torch.save(tensor, Theirs())
except RuntimeError as error:
    print(type(error).__name__)
"""


def test_a_storage_that_another_thread_resizes_during_the_write() -> None:
    """Its memory is gone: to take the checksum of it would end the process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _RESIZED], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "StorageChangedError"), done.stderr


def test_memory_that_is_not_on_the_host() -> None:
    """Comes in chunks; one chunk is smaller than this storage."""

    class Elsewhere:
        def __init__(self, data: bytes) -> None:
            self.nbytes = len(data)
            self.data = data

        def copy_to(self, address: int, start: int, length: int) -> None:
            ctypes.memmove(address, self.data[start : start + length], length)

    from fastserial.checksums import crc32

    data = noise(33 * MIB + 5).numpy().tobytes()
    theirs = Theirs()
    assert SequentialWriter._in_chunks(Elsewhere(data), theirs.write) == crc32(data)
    assert theirs.data == data


def test_an_error_of_theirs_comes_through() -> None:
    class Broken(Theirs):
        def save_torch_storage_object_list(self, *_: Any) -> int:
            raise RuntimeError("planted")

    with fast(), pytest.raises(RuntimeError, match="planted"):
        torch.save(noise(MIB), Broken())
