"""FastZipReader: stands where torch's PyTorchFileReader stands while `_load` runs.

torch's own reader still serves the pickle and the small records, and every storage that is not
as expected; the others come from the prefetch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from fastserial.checksums import crc32
from fastserial.containers.directory import (
    Directory,
    RecordEntry,
    parse_local_header,
    read_directory,
    read_exactly,
)
from fastserial.errors import CorruptCheckpointError
from fastserial.prefetch import Prefetch

__all__ = ["MOST_INFLATED", "FastZipReader", "all_checksums", "read_places", "storage_records"]

MOST_INFLATED = 1040  # deflate makes at most 1032 bytes from one

_HEADER = 30  # bytes of a local header without its name


def read_places(fd: int, size: int, stock: Any = None) -> Directory:
    """Return the central directory, local headers read only if the writer was not torch.

    Of records that bear the same name, it holds the one that torch finds.

    Args:
        fd: a descriptor that can be read at any offset.
        size: bytes of the file.
        stock: torch's reader of the same file, if there is one.

    Raises:
        CorruptCheckpointError: the container is not to be trusted.
        OSError: the file cannot be read.
    """
    directory = read_directory(fd, size, headers=False)
    first = next((record for record in directory.records if record.size), None)
    if first is not None and not _is_placed(fd, first):
        directory = read_directory(fd, size)
    if len({record.full_name.lower() for record in directory.records}) < len(directory.records):
        return replace(directory, records=_found_by_torch(fd, directory.records, stock))
    return directory


def _found_by_torch(fd: int, records: Sequence[RecordEntry], stock: Any) -> list[RecordEntry]:
    """Return the records that torch's reader finds by name, which it compares without case."""
    named: dict[bytes, list[RecordEntry]] = {}
    for record in records:
        named.setdefault(record.full_name.lower(), []).append(record)
    found: list[RecordEntry] = []
    try:
        reader: Any = stock or torch._C.PyTorchFileReader(f"/proc/self/fd/{fd}")
        for group in named.values():
            if len(group) == 1:
                found += group
                continue
            places = {record.data_offset: record for record in group}
            for name in {record.name: None for record in group}:
                place = places.get(reader.get_record_offset(name))
                if place is not None:
                    found.append(place._replace(name=name))
    except RuntimeError as error:
        raise CorruptCheckpointError(f"torch cannot read the archive: {error}") from error
    return found


def _is_placed(fd: int, record: RecordEntry) -> bool:
    raw = read_exactly(fd, record.header_offset, _HEADER + len(record.full_name))
    header = parse_local_header(raw, record.name)
    return record.header_offset + header.length == record.data_offset


def storage_records(directory: Directory) -> list[RecordEntry]:
    """Return the records that hold storages as they are: stored and not empty."""
    return [
        record
        for record in directory.records
        if record.size and record.is_stored and record.name.startswith("data/")
    ]


def all_checksums(directory: Directory) -> bool:
    """Tell whether every record has a checksum: not with `set_crc32_options` or `skip_data`."""
    return all(record.crc for record in directory.records if record.size)


class _Loaded:
    """What `_load` unpacks: `get_storage_from_record(...)._typed_storage()._untyped_storage`."""

    __slots__ = ("_untyped_storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._untyped_storage = storage

    def _typed_storage(self) -> _Loaded:
        return self


class FastZipReader:
    """Serves records to `_load`; whatever it does not know itself, torch's reader does."""

    def __init__(
        self,
        stock: Any,
        path: str,
        limit: int,
        directory: Directory | None = None,
        prefetch: Prefetch | None = None,
        verify: bool = False,
    ) -> None:
        """Stand before `stock`, a PyTorchFileReader on the same file.

        Args:
            stock: torch's reader.
            path: the file's name, for errors.
            limit: bytes that no record can exceed, whatever the file says of it.
            directory: the file's central directory; None: torch's reader is asked for sizes.
            prefetch: storages on their way; None: torch reads them all.
            verify: check the CRC-32 of what torch reads, too (needs the directory).
        """
        self.stock = stock
        self.position: int | None = None  # where torch would have left the file (bytes)
        self._path = path
        self._limit = limit
        self._records: dict[str, RecordEntry] | None = None
        if directory is not None:
            self._records = {record.name: record for record in directory.records}
        self._prefetch = prefetch
        self._verify = verify

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):  # these may move the file
            self.position = None
        return getattr(self.stock, name)

    def get_record(self, name: str) -> bytes:
        """Return a record's bytes.

        Raises:
            RuntimeError: as torch's reader; `CorruptCheckpointError` if the record is damaged.
        """
        self.position = None
        self._size(name)
        data = cast("bytes", self.stock.get_record(name))
        self._check(name, data, len(data))
        return data

    def get_storage_from_record(self, name: str, numel: int, kind: Any) -> Any:
        """Return something that holds a storage of a record's first `numel` bytes.

        Raises:
            RuntimeError: as torch's reader; `CorruptCheckpointError` if the record is damaged.
        """
        if self._prefetch is not None and numel > 0 and kind is torch.UntypedStorage:
            storage = self._prefetch.take(name, numel)
            if storage is not None:
                self.position = self._prefetch.end_of(name)
                return _Loaded(storage)
        size = self._size(name)
        if size != 0:  # else torch does not touch the file
            self.position = None
        if size is not None and numel > size:  # older torch would read past its memory
            raise self._damaged(name, f"the pickle asks for {numel} bytes of {size}")
        found = self.stock.get_storage_from_record(name, numel, kind)
        if self._verify and numel == size and numel:
            address = found._typed_storage()._untyped_storage.data_ptr()
            self._check(name, (ctypes.c_char * numel).from_address(address), numel)
        return found

    def _size(self, name: str) -> int | None:
        """Return a record's size, None if there is no such record, which torch will say."""
        if self._records is not None:
            record = self._records.get(name)
            return None if record is None else record.size
        size = int(self.stock.get_record_size(name))
        if size > self._limit:
            raise self._damaged(name, f"{size} bytes are more than the file can hold")
        return size

    def _check(self, name: str, data: Any, nbytes: int) -> None:
        record = self._records.get(name) if self._verify and self._records else None
        if record is None or not record.crc:
            return
        crc = crc32(data)
        if (crc, nbytes) != (record.crc, record.size):
            raise self._damaged(name, f"its CRC-32 is {crc:#010x}, not {record.crc:#010x}")

    def _damaged(self, name: str, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(what, path=self._path, record=name)
