"""What is converted from a file, or from safetensors files with an index: mapped, not read."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fastserial.checkpoints.mapped import Mapped, map_checkpoint
from fastserial.checkpoints.streaming import FileMemory, Places
from fastserial.checkpoints.verify import refuse_damaged
from fastserial.errors import ConvertError, CorruptCheckpointError
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.container import SafetensorsContainer
from fastserial.interrupts import Descriptors
from fastserial.memory.storages import Memory

__all__ = ["INDEX", "MappedSource", "Source", "open_source"]

INDEX = ".safetensors.index.json"
_MOST_INDEX = 1 << 30  # bytes


class Source(Places, Protocol):
    """What is converted.

    Attributes:
        container: the name of its format.
        value: what was saved.
        metadata: free text (safetensors).
    """

    container: str
    value: Any
    metadata: dict[str, str]

    def check_unchanged(self) -> None:
        """Raise if it was written to since it was opened.

        Raises:
            CorruptCheckpointError: it was.
        """

    def close(self) -> None:
        """Close its files; its objects must not be used any more."""


class MappedSource:
    """Files that are mapped."""

    def __init__(self, container: str, verify: bool = False) -> None:
        """`verify`: check every checksum of a file when it is opened, by the same descriptor."""
        self.container = container
        self._verify = verify
        self.value: Any = None
        self.metadata: dict[str, str] = {}
        self._files = Descriptors()
        self._maps: list[tuple[int, Mapped, FileStamp, str]] = []
        self._starts: list[tuple[int, int]] = []  # the address of each mapping, and which it is
        self._checksums: dict[int, dict[int, int]] = {}  # by the place of a record, of each file

    def add(self, name: str) -> Mapped:
        """Map a file.

        Raises:
            ConvertError, CorruptCheckpointError, OSError: as `map_checkpoint`.
        """
        fd = self._files.open(name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is refused
        before = stamp(fd)
        if self._verify:
            refuse_damaged(name, fd)
        mapped = map_checkpoint(fd, name)
        if isinstance(mapped.file, SafetensorsContainer):
            self.metadata.update(mapped.file.metadata)
        bisect.insort(self._starts, (mapped.whole.data_ptr(), len(self._maps)))
        self._maps.append((fd, mapped, before, name))
        return mapped

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return where bytes of a storage come from, None if it is in no mapping."""
        found = self._place(storage)
        return None if found is None else FileMemory(found[0], found[2] + start, nbytes)

    def crc_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the CRC-32 of a storage as its file tells it, None if it tells none."""
        found = self._place(storage)
        if found is None:
            return None
        fd, mapped, offset = found
        if fd not in self._checksums:
            records = mapped.file.records
            self._checksums[fd] = {record.data_offset: record.crc for record in records}
        return self._checksums[fd].get(offset) or None

    def _place(self, storage: torch.UntypedStorage) -> tuple[int, Mapped, int] | None:
        """Return in which file a storage is, and where (bytes), None if it is in no mapping."""
        at = bisect.bisect_right(self._starts, (storage.data_ptr(), len(self._maps))) - 1
        if at < 0:
            return None
        fd, mapped, _, _ = self._maps[self._starts[at][1]]
        offset = mapped.offset_of(storage)
        return None if offset is None else (fd, mapped, offset)

    def in_order(self, _: torch.Tensor) -> Memory | None:
        """Return None: they are read from the mapping."""
        return None

    def check_unchanged(self) -> None:
        """Raise if a file was written to.

        Raises:
            CorruptCheckpointError: one was.
        """
        for fd, _, before, name in self._maps:
            if not before.holds_for(fd):
                raise CorruptCheckpointError("the file changed while it was read", path=name)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def open_source(name: str, verify: bool = False) -> MappedSource:
    """Open a file, or safetensors files with an index: given that, or the folder.

    Args:
        name: its path.
        verify: check every checksum first.

    Raises:
        ConvertError: the pickle needs more than `weights_only` allows.
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is no checkpoint.
        OSError: it cannot be read.
    """
    index = _index_of(name)
    if index is None:
        return _opened(MappedSource("", verify), lambda source: _fill(source, name))
    return _opened(
        MappedSource("safetensors", verify), lambda source: _fill_from_index(source, index)
    )


def _opened(source: MappedSource, fill: Callable[[MappedSource], None]) -> MappedSource:
    try:
        fill(source)
    except BaseException:
        source.close()
        raise
    return source


def _fill(source: MappedSource, name: str) -> None:
    mapped = source.add(name)
    source.container, source.value = mapped.container, mapped.value


def _index_of(name: str) -> str | None:
    """Return the path of the index, None if it is none."""
    if name.endswith(INDEX):
        return name
    if not os.path.isdir(name):
        return None
    found = [one for one in sorted(os.listdir(name)) if one.endswith(INDEX)]
    if len(found) > 1:
        raise ConvertError(f"{name}: there are several indices: give one of {', '.join(found)}")
    return os.path.join(name, found[0]) if found else None


def _fill_from_index(source: MappedSource, index: str) -> None:
    with open(index, "rb") as file:
        text = file.read(_MOST_INDEX)
    try:
        files = json.loads(text)["weight_map"]
        keys_of: dict[str, list[str]] = {}
        for key, name in files.items():
            keys_of.setdefault(os.fspath(name), []).append(key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError("it is no index of safetensors files", path=index) from error
    tensors: dict[str, torch.Tensor] = {}
    for name, keys in keys_of.items():
        if os.path.basename(name) != name:
            raise CorruptCheckpointError(f"it names {name!r}, which is not beside it", path=index)
        found = source.add(os.path.join(os.path.dirname(index), name)).value
        for key in keys:
            if key not in found:
                raise CorruptCheckpointError(f"{name} has no tensor {key!r}", path=index)
            tensors[key] = found[key]
    source.value = {key: tensors[key] for key in files}
