"""What a file says of itself, in one shape: the one place where formats are told apart."""

from __future__ import annotations

import abc
import enum
import os
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property

from fastserial.errors import (
    CheckpointFileError,
    CheckpointKeyError,
    CorruptCheckpointError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
    UnreadableTensorError,
)
from fastserial.formats.legacy.structure import MAGIC, read_legacy
from fastserial.formats.pickles import Limits, decode
from fastserial.formats.safetensors import read_header
from fastserial.formats.source import BytesSource, ByteStream, DescriptorSource, Source
from fastserial.formats.storages import PACKED
from fastserial.formats.tensors import Outline, TensorEntry, outline, zip_outline
from fastserial.formats.zip.directory import RecordEntry, read_directory
from fastserial.formats.zip.records import read_places, read_record
from fastserial.formats.zip.structs import LOCAL_SIGNATURE

__all__ = [
    "Container",
    "Format",
    "LegacyContainer",
    "SafetensorsContainer",
    "ZipContainer",
    "detect",
    "format_of_head",
    "open_container",
]

_SMALL_RECORD = 4096
_MAGIC_AT_MOST = 64  # bytes of a legacy file's first pickle in any pickle protocol


class Format(enum.Enum):
    """What a file is: the format's name for the first three, or why it is no checkpoint."""

    ZIP = "zip"
    LEGACY = "legacy"
    SAFETENSORS = "safetensors"
    DAMAGED_ZIP = "the first bytes of the archive are damaged"
    SHARD = "a shard of torch.distributed.checkpoint, which holds many small archives"
    FOLDER = "a directory, and none that torch.distributed.checkpoint saved to: give a file"
    SPECIAL = "not a regular file"
    EMPTY = "the file is empty"
    OTHER = "neither a zip, a legacy nor a safetensors checkpoint"


class Container(abc.ABC):
    """What a file says of itself.

    with open("ckpt.pt", "rb") as file:
        container = open_container(file.fileno(), file.name)
        container.offset_of(container.tensor("model.weight"))

    Attributes:
        format: its name.
        source: the file.
        records: what a zip archive is made of, as its directory tells it.
    """

    format: str
    records: Sequence[RecordEntry] = ()

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    @abc.abstractmethod
    def outline(self) -> Outline:
        """Its storages, tensors and problems; a zip's and legacy file's pickle is read for it.

        Raises:
            CorruptCheckpointError: the pickle is damaged.
            PickleLimitError: it is larger than the limits.
            OSError: the file cannot be read.
        """

    @property
    def byte_order(self) -> str | None:
        """Of the storages, `little` or `big`; None where the file does not say.

        Raises:
            CorruptCheckpointError: the record that says so is damaged.
            OSError: it cannot be read.
        """
        return "little"

    @cached_property
    def _tensors(self) -> dict[str, TensorEntry | str]:
        """The tensors by key; a text instead of one says why it cannot be read by itself."""
        found = self.outline
        entries: dict[str, TensorEntry | str] = {}
        for tensor in found.tensors:
            if tensor.key in entries:
                entries[tensor.key] = "two tensors have this key"
            else:
                entries[tensor.key] = self._obstacle(tensor) or tensor
        return found.problems | found.unread | entries

    def _obstacle(self, tensor: TensorEntry) -> str | None:
        """Return why a tensor cannot be read by itself, None if it can."""
        if tensor.storage is None:
            return "the file holds no bytes of it (a meta tensor)"
        if tensor.kind == "quantized" or tensor.dtype in PACKED:
            return "it is quantized"
        storage = self.outline.storages[tensor.storage]
        start, stop = tensor.span
        if start == stop:
            return None
        if storage.offset is None:
            return "its storage is compressed, or not in the file"
        if stop > storage.held:
            return f"its bytes go past the {storage.held} of its storage"
        return None

    def keys(self) -> list[str]:
        """Return the keys of all tensors, those that cannot be read by themselves included.

        Those of which the pickle does not say enough come first.
        """
        return list(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def tensor(self, key: str) -> TensorEntry:
        """Return a tensor whose bytes lie in the file as they are.

        Raises:
            CheckpointKeyError: there is no such tensor.
            UnreadableTensorError: it is there, but cannot be read by itself; says why.
        """
        found = self._tensors.get(key)
        if found is None:
            raise CheckpointKeyError(f"there is no tensor {key!r}")
        if isinstance(found, str):
            raise UnreadableTensorError(f"tensor {key!r} cannot be read by itself: {found}")
        return found

    def offset_of(self, tensor: TensorEntry) -> int:
        """Return where the first element of one of its tensors lies in the file (bytes)."""
        storage = self.outline.storages[tensor.storage or ""]
        return (storage.offset or 0) + tensor.span[0]


class ZipContainer(Container):
    """A zip archive, such as `torch.save` writes."""

    format = Format.ZIP.value

    def __init__(
        self, source: Source, limits: Limits | None = None, all_records: bool = False
    ) -> None:
        """Read its directory.

        Args:
            limits: on its pickle.
            all_records: each local header is read, and records may have one name and differ.

        Raises:
            CorruptCheckpointError: it is damaged.
            UnreadableCheckpointError: it is in several parts, or its directory too large.
            OSError: it cannot be read.
        """
        super().__init__(source)
        self._limits = limits
        self.directory = read_directory(source) if all_records else read_places(source)
        self.records = self.directory.records

    @property
    def byte_order(self) -> str | None:
        record = self.directory.find("byteorder")
        if record is None:  # torch before 2.1
            return None
        return read_record(self.source, record, _SMALL_RECORD).decode("utf-8", "backslashreplace")

    @cached_property
    def outline(self) -> Outline:
        return zip_outline(self.source, self.directory, self._limits) or Outline()


class LegacyContainer(Container):
    """What torch wrote before 1.6, and writes on request."""

    format = Format.LEGACY.value

    def __init__(self, source: Source, limits: Limits | None = None) -> None:
        """Read its structure.

        Args:
            limits: on its pickles.

        Raises:
            CorruptCheckpointError: it is damaged; `record` is the storage, where it is one.
            PickleLimitError: its pickles are larger than the limits.
            OSError: it cannot be read.
        """
        super().__init__(source)
        self._limits = limits
        self.file = read_legacy(source, limits)

    @property
    def byte_order(self) -> str | None:
        return "little" if self.file.little_endian else "big"

    @cached_property
    def outline(self) -> Outline:
        found = outline(self.file.decoded, self._limits)
        found.storages = self.file.storages
        return found


class SafetensorsContainer(Container):
    """A safetensors file; `metadata` is the free text in its header, by name."""

    format = Format.SAFETENSORS.value

    def __init__(self, source: Source) -> None:
        """Read its header.

        Raises:
            CorruptCheckpointError: it is damaged, or names bytes that are not in the file.
            OSError: it cannot be read.
        """
        super().__init__(source)
        self._outline, self.metadata = read_header(source)

    @property
    def outline(self) -> Outline:
        return self._outline


def open_container(
    fd: int, path: str, limits: Limits | None = None, all_records: bool = False
) -> ZipContainer | LegacyContainer | SafetensorsContainer:
    """Return what an open file says of itself.

    Args:
        fd: its descriptor, which its owner closes; positions are not used.
        path: its name, which counts where the first bytes do not tell, and is named by errors.
        limits: on its pickle.
        all_records: as of `ZipContainer`.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is no checkpoint of these formats.
        PickleLimitError: its pickle is larger than the limits.
        OSError: it cannot be read.
    """
    try:
        found, source = detect(fd, path), DescriptorSource(fd)
        if found is Format.DAMAGED_ZIP:
            raise CorruptCheckpointError(found.value, offset=0)
        if found is Format.ZIP:
            return ZipContainer(source, limits, all_records)
        if found is Format.LEGACY:
            return LegacyContainer(source, limits)
        if found is Format.SAFETENSORS:
            return SafetensorsContainer(source)
        raise UnreadableCheckpointError(found.value)
    except CheckpointFileError as error:
        error.path = error.path or path
        raise


def format_of_head(source: Source) -> Format | None:
    """Return the format that a file's first bytes show (zip as torch tells it), or None.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        head = source.read_at(0, min(_MAGIC_AT_MOST, source.size))
    except TruncatedCheckpointError:  # a log that is emptied meanwhile, a file of the kernel's
        return None
    if head.startswith(LOCAL_SIGNATURE):
        return Format.ZIP
    try:
        value = decode(ByteStream(BytesSource(head))).value
    except CheckpointFileError:
        return None
    return Format.LEGACY if type(value) is int and value == MAGIC else None


def detect(fd: int, name: str) -> Format:
    """Return what an open file is.

    Args:
        fd: its descriptor; positions are not used.
        name: its path.

    Raises:
        OSError: the file cannot be read.
    """
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        return Format.FOLDER
    if not stat.S_ISREG(found.st_mode):
        return Format.SPECIAL
    if not found.st_size:
        return Format.EMPTY
    if name.endswith(".distcp"):
        return Format.SHARD
    source = DescriptorSource(fd)
    head = format_of_head(source)
    if head is not None:
        return head
    if name.endswith(".safetensors"):
        return Format.SAFETENSORS
    try:
        read_directory(source, headers=False)
    except CheckpointFileError:
        return Format.OTHER
    return Format.DAMAGED_ZIP
