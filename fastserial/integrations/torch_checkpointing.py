"""A storage for torch_checkpointing: durable, checked on load, at disk speed.

`CheckpointManager.Config(storage_config=FastStorageConfig(), subprocess_init_fn=init_process)`.
The package is imported with this module, and it with nothing else.
"""

from __future__ import annotations

import ctypes
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_checkpointing.storage.base_storage import StorageConfig
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
)

from fastserial.checksums import check_crc, crc32
from fastserial.config import options
from fastserial.files.durable import sync_folders
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import LOCAL_SIGNATURE, read_places
from fastserial.loading.reader import FastFileReader, HostSink, ReadExtent
from fastserial.patching.install import install
from fastserial.saving.writer import FastFileWriter

__all__ = ["FastStorage", "FastStorageConfig", "init_process"]


def init_process(*_: Any) -> None:
    """Install fastserial in the process that writes: the manager's `subprocess_init_fn`.

    Not needed with `FASTSERIAL=1`. Without either, its files are correct, but torch copies and
    checksums the data.
    """
    install()


@dataclass
class FastStorageConfig(StorageConfig):
    """Creates the storage in each process.

    Attributes:
        durable: sync files and folders before a write returns.
        verify: compare the CRC-32s of a file that is loaded as a whole.
    """

    durable: bool = True
    verify: bool = True

    def create_storage(self) -> FastStorage:
        """Return a storage."""
        return FastStorage(self)


class FastStorage(LocalFileSystemStorage):
    """Files of the local file system, written and read by fastserial."""

    def __init__(self, config: FastStorageConfig) -> None:
        super().__init__(LocalFileSystemStorageConfig(use_direct_io=False))
        self._durable = config.durable
        self._verify = config.verify

    @property
    def mmap_fill_workers(self) -> int:
        """1: one of our reads already makes many requests at once."""
        return 1

    def stream_read(self, path: Path, read_args: Any = None) -> Any:
        """Return a stream of a file, or of a copy in memory if `read_args` asks for one.

        Raises:
            CorruptCheckpointError: a record is damaged.
            OSError: the file cannot be read.
        """
        stream = _ReadStream(path, self._verify)
        if read_args is not None and not read_args.pre_read_full_file:
            return stream
        with stream:
            data = bytearray(stream.nbytes)
            stream.readinto(data)
        return io.BytesIO(data)

    def stream_write(self, path: Path) -> Any:
        """Return a stream that replaces a file when it is closed.

        Raises:
            WriteError: it cannot be written.
        """
        with options(durable=self._durable):
            return FastFileWriter(path, container="zip")

    def write(self, path: Path, data: Any) -> None:
        """Replace a file.

        Raises:
            WriteError: it cannot be written.
        """
        with self.stream_write(path) as file:
            file.write(data)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Create a folder."""
        super().mkdir(path, recursive)
        self._sync(path)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Rename a file or folder durably.

        Raises:
            OSError: the destination exists.
        """
        super().rename(src_path, dst_path, is_directory, background_cleanup)
        self._sync(os.path.dirname(os.path.abspath(dst_path)))

    def _sync(self, folder: str | os.PathLike[str]) -> None:
        if self._durable:
            sync_folders([os.fspath(folder)])


class _ReadStream(io.FileIO):
    """A file, read in batches directly into the caller's memory."""

    read = io.RawIOBase.read  # type: ignore[assignment]  # which calls `readinto`
    readall = io.RawIOBase.readall

    def __init__(self, path: Path, verify: bool) -> None:
        super().__init__(path, "rb")
        self._verify = verify
        self._reader = FastFileReader(self.fileno(), name=os.fspath(path))
        self.nbytes = self._reader.size

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits; a file that is read in one call is verified.

        Raises:
            CorruptCheckpointError: a record is damaged.
            OSError: the file cannot be read.
        """
        with memoryview(buffer).cast("B") as view:
            at = self.tell()
            length = max(0, min(len(view), self.nbytes - at))
            if not length:
                return 0
            anchor = ctypes.c_char.from_buffer(view)
            sink = HostSink(ctypes.addressof(anchor), length, buffer)
            del anchor
            self._reader.read_into([ReadExtent(at, length, sink)])
            if self._verify and length == self.nbytes:
                with view[:length] as data:  # tracebacks must not hold the caller's memory
                    self._check(data)
            self.seek(at + length)
            return length

    def _check(self, data: memoryview) -> None:
        """Compare the CRC-32s of a zip archive with its records; other files have none."""
        if data[: len(LOCAL_SIGNATURE)] != LOCAL_SIGNATURE:
            return
        reader = self._reader
        with reader.translated():
            for record in read_places(DescriptorSource(reader.fd)).records:
                if not record.crc or not record.is_stored:
                    continue
                found = crc32(data[record.data_offset : record.data_end])
                check_crc(found, record.crc, None, record.name, record.data_offset)

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()
