"""Save and load past the host with the cuFile bindings of this Python, and a stub of cuFile.

`python past_the_host.py LIBRARY WORD FOLDER`; the device is made up, what it does is done at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.devices import FakeDevice, plugged_in

import fastserial
from fastserial.config import Config
from fastserial.engines.gds import cufile
from fastserial.formats.extents import Data, Extent
from fastserial.loading import reader
from fastserial.loading.reader import FastFileReader, ReadExtent, storage_sink
from fastserial.memory.storages import StorageMemory

BLOCK = 16384


def main(library: str, word: str, folder: Path) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # by whose name the bindings find it loaded
    patch = pytest.MonkeyPatch()
    plugged_in(patch, FakeDevice(haste=1.0))
    patch.setattr(cufile, "missing", lambda: None)
    patch.setattr(cufile, "serves", lambda place: True)
    patch.setattr(cufile.CuFile, "on", lambda driver, device: contextlib.nullcontext())
    patch.setattr(reader, "is_on_host", lambda storage: False)
    warnings.simplefilter("ignore")
    config = Config(block_size=BLOCK, queue_depth=3, small_file=0, direct=True, transfer=word)
    wanted = torch.randint(0, 256, (20 * BLOCK + 5,), dtype=torch.uint8)
    path = folder / "a"
    with fastserial.FastFileWriter(path, config) as writer:
        source = Data(StorageMemory(wanted.untyped_storage()), wanted.nbytes, None)
        writer.write_layout([Extent(0, wanted.nbytes, source)], wanted.nbytes)
    assert path.read_bytes() == wanted.numpy().tobytes()
    saved = writer.report
    assert saved is not None
    print(saved.transfer, saved.transfer_why, sep=": ")
    found = torch.zeros_like(wanted)
    with FastFileReader(path, config) as file:
        storage = found.untyped_storage()
        file.attend([storage])
        file.read_into([ReadExtent(0, wanted.nbytes, storage_sink(storage, file.ring))])
        assert torch.equal(found, wanted)
        print(file.transfer.word, file.transfer.why, sep=": ")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
