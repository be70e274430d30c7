"""The files of a checkpoint: opened when they are needed, and read as if they were one.

An address is an offset in all of them: the number of the file, above 64 bits of offset. So plans
and windows need not know which file a tensor is in.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from fastserial.checksums import check_crc, crc32
from fastserial.config import Config
from fastserial.errors import (
    CheckpointFileError,
    CheckpointReplacedError,
    ConvertError,
    CorruptCheckpointError,
    PickleLimitError,
    UnreadableCheckpointError,
)
from fastserial.files.sources import FileStamp
from fastserial.formats.outline import bounded_pickle
from fastserial.formats.source import BytesSource, DescriptorSource
from fastserial.formats.stored import OF_ANOTHER, Chunk, check_archive
from fastserial.formats.zip_format import PICKLE, read_places
from fastserial.interrupts import finish, ours
from fastserial.loading.pump import ReadCounts
from fastserial.loading.reader import FastFileReader, ReadExtent, translated
from fastserial.reports import HOST_ONLY

_OFFSET_BITS = 64
_MOST_OPEN = 64  # files
REPLACED = "another save into this folder completed while it was loaded: load again"


def address(number: int, offset: int) -> int:
    """Return the address of an offset in the file of a number."""
    return (number << _OFFSET_BITS) + offset


def number_of(place: int) -> int:
    """Return the number of the file in which an address is."""
    return place >> _OFFSET_BITS


class StoredFiles:
    """Files of one checkpoint.

    Attributes:
        path: of the only file, or of the folder.
        names: of the files, in the order of their addresses, which they have from the first one
            on; of the only file it is empty.
        has_items: their chunks are items, which have to be looked at.
        completed: path and state of what completes the checkpoint, if another save may replace it.
    """

    def __init__(self, path: str, config: Config) -> None:
        self.path = path
        self.config = config
        self.names: list[str] = []
        self.has_items = False
        self.completed: tuple[str, FileStamp] | None = None
        self._readers: dict[str, FastFileReader] = {}  # the last one of each file
        self._every: list[FastFileReader] = []

    # -- bytes ---------------------------------------------------------------------------------

    def open(self, name: str) -> FastFileReader:
        """Return the reader of a file, which is good until many others were opened.

        Raises:
            CheckpointReplacedError: another save removed the file.
            CorruptCheckpointError: it is another one than before.
            OSError: it cannot be opened, or is no regular file.
        """
        before = self._readers.get(name)
        if before is not None and not before.closed:
            return before
        others = [reader for reader in self._every if not reader.closed]
        if len(others) == _MOST_OPEN:
            others[0].close()
        try:
            found = FastFileReader(self.path_of(name), self.config)
        except ours(FileNotFoundError) as error:
            if self._is_replaced():
                raise CheckpointReplacedError(errno.ENOENT, REPLACED, error.filename) from error
            raise
        self._readers[name] = found
        self._every.append(found)
        if before is not None and not before.stamp.holds_for(found.fd):
            raise CorruptCheckpointError("the file changed while it was read", path=found.name)
        return found

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        """Read extents, whose offsets are addresses.

        Raises:
            CorruptCheckpointError: a file ends before one does, or changed.
            OSError: it cannot be read.
        """
        extents = sorted(extents, key=lambda extent: extent.offset)
        for number, some in groupby(extents, key=lambda extent: number_of(extent.offset)):
            base = address(number, 0)
            here = [extent._replace(offset=extent.offset - base) for extent in some]
            self.open(self.names[number]).read_into(here)

    def address_of(self, chunk: Chunk) -> int:
        """Return the address of a chunk's first element."""
        return address(self._numbers[chunk.file], chunk.offset + (chunk.start or 0))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def report(self) -> dict[str, Any]:
        """Return what was read and how: arguments of `report_load`."""
        blocks = [reader.blocks for reader in self._every]
        direct = sum(one.counts.direct for one in blocks)
        transfers = [reader.transfer for reader in self._every]
        return {
            "counts": ReadCounts(direct, sum(one.counts.cached for one in blocks)),
            "engine": blocks[-1].engine_name if blocks else "buffered",
            "fallback": next((one.fallback for one in blocks if one.fallback), None),
            "transfer": next((one for one in transfers if one != HOST_ONLY), HOST_ONLY),
        }

    def close(self) -> None:
        """Close the files. Idempotent."""
        finish(*[reader.close for reader in self._every])

    def check_unchanged(self) -> None:
        """Raise if a file was written to, which no save does.

        Raises:
            CorruptCheckpointError: one was.
        """
        for reader in self._every:
            if not reader.closed:
                reader.check_unchanged()

    def path_of(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name) if name else self.path

    def _is_replaced(self) -> bool:
        if self.completed is None:
            return False
        path, before = self.completed
        try:
            with open(path, "rb") as file:
                return not before.holds_for(file.fileno())
        except ours(FileNotFoundError):
            return True

    # -- items of a folder -----------------------------------------------------------------------

    def located(self, chunk: Chunk) -> Chunk | None:
        """Return a chunk with the place of its elements, None if only torch can read it.

        Raises:
            CorruptCheckpointError: its file ends before it does, it is damaged, or of another
                checkpoint.
            UnreadableCheckpointError: it is an archive that is not read here.
            OSError: it cannot be read.
        """
        if not self.has_items:
            return chunk
        source = self._bytes_of(chunk)
        with self._naming(chunk):
            return chunk.located(source)

    def tensor_of(self, chunk: Chunk) -> torch.Tensor:
        """Return a chunk that only torch can read.

        Raises:
            ConvertError: it needs more than `weights_only` allows.
            CorruptCheckpointError: it is damaged.
            OSError: it cannot be read.
        """
        data = self.data_of(chunk)
        if self.config.verify_on_load:
            self.is_sound(chunk, data)
        found = self.value_of(chunk, data)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != chunk.elements.sizes:
            raise self.damaged(chunk, OF_ANOTHER)
        return found

    def data_of(self, chunk: Chunk) -> bytes:
        """Return the bytes of an item.

        Raises:
            CorruptCheckpointError: its file ends before it does.
            OSError: it cannot be read.
        """
        source = self._bytes_of(chunk)
        with self._naming(chunk):
            return source.read_at(0, chunk.length)

    def value_of(self, chunk: Chunk, data: bytes) -> Any:
        """Return a value, or a tensor that only torch can read, given the bytes of its item.

        Raises:
            ConvertError: it needs more than `weights_only` allows, or went through an extension.
            CorruptCheckpointError: it is damaged.
        """
        if chunk.is_extended:
            text = "went through an extension: load it with dcp.load"
            raise ConvertError(f"entry {chunk.name!r} {text}")
        try:
            source = BytesSource(data)
            pickled = read_places(source).find(PICKLE)
            if pickled is not None:  # else torch says what is wrong
                bounded_pickle(source, pickled)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except ours(Exception) as error:
            try:
                check_archive(data)
            except ours(CheckpointFileError) as damage:  # torch wrote no such archive
                raise self.damaged(chunk, damage.message) from error
            what = str(error).partition("\n")[0]
            raise ConvertError(
                f"entry {chunk.name!r} cannot be loaded under the rules of weights_only: {what}"
            ) from error

    def is_sound(self, chunk: Chunk, data: bytes) -> bool:
        """Compare the bytes of a value with its checksums; return whether it has any.

        Raises:
            CorruptCheckpointError: they differ.
        """
        with self._naming(chunk):
            if chunk.start is None or chunk.box is not None:  # torch wrote it
                return check_archive(data)
            if chunk.crc is not None:
                check_crc(crc32(data), chunk.crc)
        return chunk.crc is not None

    def damaged(self, chunk: Chunk, text: str) -> CorruptCheckpointError:
        """Return the error that an item is damaged."""
        path = self.path_of(chunk.file)
        return CorruptCheckpointError(text, path=path, record=chunk.name, offset=chunk.offset)

    def _bytes_of(self, chunk: Chunk) -> DescriptorSource:
        if not chunk.file:
            raise self.damaged(chunk, "`.metadata` does not say where it is")
        if os.path.basename(chunk.file) != chunk.file:
            raise self.damaged(chunk, f"its file {chunk.file!r} is not in the folder")
        found = self.open(chunk.file)
        if chunk.offset + chunk.length > found.size:
            raise self.damaged(chunk, "the file ends before it does")
        return DescriptorSource(found.fd, chunk.offset, chunk.length)

    @contextlib.contextmanager
    def _naming(self, chunk: Chunk) -> Iterator[None]:
        """Name item and file in an error of its archive."""
        try:
            with translated(self.path_of(chunk.file)):
                yield
        except ours(UnreadableCheckpointError) as error:
            error.path, error.record = self.path_of(chunk.file), chunk.name
            raise
        except ours(CorruptCheckpointError) as error:
            raise self.damaged(chunk, error.message) from error
        except ours(PickleLimitError) as error:
            raise self.damaged(chunk, str(error)) from error
