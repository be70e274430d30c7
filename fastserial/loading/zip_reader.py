"""FastZipReader: stands in for torch's PyTorchFileReader in `_load`.

torch's own reader still reads the pickle, the small records, and every storage that is not as
expected; the prefetch reads the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from fastserial.checksums import check_crc, crc32
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip.directory import Directory, RecordEntry

if TYPE_CHECKING:
    from fastserial.loading.prefetch import Prefetch


class _Loaded:
    """What `_load` unpacks: `get_storage_from_record(...)._typed_storage()._untyped_storage`."""

    __slots__ = ("_untyped_storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._untyped_storage = storage

    def _typed_storage(self) -> _Loaded:
        return self


class FastZipReader:
    """Serves records to `_load`; everything else is delegated to torch's reader."""

    def __init__(
        self,
        stock: Any,
        path: str,
        limit: int,
        directory: Directory | None = None,
        prefetch: Prefetch | None = None,
        verify: bool = False,
    ) -> None:
        """Wrap `stock`, a PyTorchFileReader on the same file.

        Args:
            stock: torch's reader.
            path: the file's name, for errors.
            limit: bytes that no record can exceed, whatever the file says of it.
            directory: the file's central directory; None: sizes come from torch's reader.
            prefetch: reads the storages ahead; None: torch reads them all.
            verify: also check the CRC-32 of what torch reads (needs the directory).
        """
        self.stock = stock
        self.position: int | None = None  # where torch would have left the file (bytes)
        self._path = path
        self._limit = limit
        known = directory.records if directory is not None else ()
        self._records: Mapping[str, RecordEntry] = {record.name: record for record in known}
        self._has_directory = directory is not None
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
        self._check(name, data)
        return data

    def get_storage_from_record(self, name: str, numel: int, kind: Any) -> Any:
        """Return something that holds a storage of a record's first `numel` bytes.

        Raises:
            RuntimeError: as torch's reader; `CorruptCheckpointError` if the record is damaged.
        """
        if self._prefetch is not None and numel > 0 and kind is torch.UntypedStorage:
            storage = self._prefetch.take(name, numel)
            if storage is not None:
                self.position = self._records[name].data_end
                return _Loaded(storage)
        size = self._size(name)
        if size != 0:  # else torch does not touch the file
            self.position = None
        if size is not None and numel > size:  # older torch would read past its memory
            raise self._damaged(name, f"the pickle asks for {numel} bytes of {size}")
        found = self.stock.get_storage_from_record(name, numel, kind)
        if self._verify and numel and numel != size:
            self.get_record(name)  # all of it has the checksum
        elif self._verify and numel:
            address = found._typed_storage()._untyped_storage.data_ptr()
            self._check(name, (ctypes.c_char * numel).from_address(address))
        return found

    def _size(self, name: str) -> int | None:
        """Return a record's size, None if there is no such record, which torch will say."""
        if self._has_directory:
            record = self._records.get(name)
            return None if record is None else record.size
        size = int(self.stock.get_record_size(name))
        if size > self._limit:
            raise self._damaged(name, f"{size} bytes are more than the file can hold")
        return size

    def _check(self, name: str, data: Any) -> None:
        record = self._records.get(name) if self._verify else None
        if record is not None and record.crc:
            check_crc(crc32(data), record.crc, self._path, name, record.data_offset)

    def _damaged(self, name: str, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(what, path=self._path, record=name)
