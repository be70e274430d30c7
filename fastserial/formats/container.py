"""What a checkpoint contains, in one interface: `detect` names the format, `Container` reads it."""

from __future__ import annotations

import abc
import enum
import os
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

from fastserial.errors import (
    CheckpointFileError,
    CheckpointKeyError,
    ConvertError,
    CorruptCheckpointError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
    UnreadableTensorError,
)
from fastserial.formats.dcp import METADATA_NAME, Metadata, parse
from fastserial.formats.legacy import MAGIC, read_legacy
from fastserial.formats.outline import Outline, outline, zip_outline
from fastserial.formats.pickles import Budget, Limits, decode
from fastserial.formats.safetensors import read_header
from fastserial.formats.source import (
    BytesSource,
    ByteStream,
    DescriptorSource,
    Source,
    naming,
    read_regular,
)
from fastserial.formats.tensors import (
    ITEM_BYTES,
    PACKED,
    TensorEntry,
    contiguous_stride,
)
from fastserial.formats.zip_format import (
    LOCAL_SIGNATURE,
    PICKLE,
    RecordEntry,
    ambiguous_parts,
    read_directory,
    read_places,
    read_record,
)
from fastserial.interrupts import Descriptors, ours

_SMALL_RECORD = 4096
_MOST_NOTES = 100
_MAGIC_AT_MOST = 64  # bytes of a legacy file's first pickle in any pickle protocol


class Format(enum.Enum):
    """What a path is: the format's name for the first four, or why it is no checkpoint."""

    ZIP = "zip"
    LEGACY = "legacy"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    DAMAGED_ZIP = "the first bytes of the archive are damaged"
    SHARD = "a shard of torch.distributed.checkpoint, which holds many small archives"
    FOLDER = "a directory, and none that torch.distributed.checkpoint saved to: give a file"
    SPECIAL = "not a regular file"
    EMPTY = "the file is empty"
    ZEROS = "the file has only zeros, as a power cut leaves one that was not synced"
    OTHER = "neither a zip, a legacy nor a safetensors checkpoint"

    @property
    def is_damage(self) -> bool:
        """Whether it is what is left of a checkpoint."""
        return self in (Format.DAMAGED_ZIP, Format.EMPTY, Format.ZEROS)


class Container(abc.ABC):
    """What a file, or a folder, says of its contents.

    with open("ckpt.pt", "rb") as file:
        container = open_container(DescriptorSource(file.fileno()), file.name)
        container.offset_of(container.tensor("model.weight"))

    Attributes:
        format: name of the format.
        nbytes: size of the file, or of the folder's files.
        archive_name: the folder in the names of a zip's records.
    """

    format: str
    nbytes: int
    archive_name: str | None = None

    @property
    @abc.abstractmethod
    def outline(self) -> Outline:
        """Storages, tensors and problems; the pickle is read for it.

        Raises:
            CorruptCheckpointError: the pickle is damaged.
            PickleLimitError: it is larger than the limits.
            OSError: the file cannot be read.
        """

    @property
    def byte_order(self) -> str | None:
        """Byte order of the storages, `little` or `big`; None where the file does not say.

        Raises:
            CorruptCheckpointError: the record that says so is damaged.
            OSError: it cannot be read.
        """
        return "little"

    def listing(self) -> list[tuple[str, int, int]]:
        """Return name, offset and bytes of each record (zip) or item (DCP)."""
        return []

    def notes(self) -> list[str]:
        """Return what is unusual, and what could not be found out, a sentence each."""
        notes = self.outline.notes
        if not self.outline.complete:
            notes.append("there is more in the pickle than the limits allow to look at")
        return notes

    # -- tensors -------------------------------------------------------------------------------

    @cached_property
    def _tensors(self) -> dict[str, TensorEntry | str]:
        """The tensors by key; a text instead says why a tensor cannot be read by itself."""
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

        Those that the pickle does not fully describe come first.
        """
        return list(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def tensor(self, key: str) -> TensorEntry:
        """Return a tensor whose bytes are in the file, uncompressed.

        Raises:
            CheckpointKeyError: there is no such tensor.
            UnreadableTensorError: it exists, but cannot be read by itself; says why.
        """
        found = self._tensors.get(key)
        if found is None:
            raise CheckpointKeyError(f"there is no tensor {key!r}")
        if isinstance(found, str):
            raise UnreadableTensorError(f"tensor {key!r} cannot be read by itself: {found}")
        return found

    def offset_of(self, tensor: TensorEntry) -> int:
        """Return the offset of a tensor's first element in the file (bytes)."""
        storage = self.outline.storages[tensor.storage or ""]
        return (storage.offset or 0) + tensor.span[0]


class FileContainer(Container):
    """A container in one file.

    Attributes:
        source: the file.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.nbytes = source.size


class ZipContainer(FileContainer):
    """A zip archive, such as `torch.save` writes."""

    format = Format.ZIP.value

    def __init__(self, source: Source, limits: Limits | None = None, unique: bool = True) -> None:
        """Read its directory.

        Args:
            limits: on its pickle.
            unique: as of `read_places`.

        Raises:
            CorruptCheckpointError: it is damaged.
            UnreadableCheckpointError: it is in several parts, or its directory too large.
            OSError: it cannot be read.
        """
        super().__init__(source)
        self._limits = limits
        self.directory = read_places(source, unique)
        self.records: Sequence[RecordEntry] = self.directory.records
        self.archive_name = self.directory.archive_name

    @property
    def byte_order(self) -> str | None:
        record = self.directory.find("byteorder")
        if record is None:  # torch before 2.1
            return None
        return read_record(self.source, record, _SMALL_RECORD).decode("utf-8", "backslashreplace")

    @cached_property
    def outline(self) -> Outline:
        return zip_outline(self.source, self.directory, self._limits) or Outline()

    def listing(self) -> list[tuple[str, int, int]]:
        order = self.directory.in_file_order()
        return [(record.name, record.data_offset, record.size) for record in order]

    def notes(self) -> list[str]:
        if self.directory.find(PICKLE) is None:
            return ["there is no data.pkl: no checkpoint of torch.save"]
        twice = next(ambiguous_parts(self.directory), None)
        some = [f"several records have the name {twice.name}, and differ"] if twice else []
        return [*some, *super().notes()]


class LegacyContainer(FileContainer):
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
        self._budget = Budget(limits or Limits.of(source.size))
        self.file = read_legacy(source, self._budget)
        if limits is None:
            self._budget.narrow(self.file.decoded.nbytes)  # the rest of the file is storages

    @property
    def byte_order(self) -> str | None:
        return "little" if self.file.little_endian else "big"

    @cached_property
    def outline(self) -> Outline:
        found = outline(self.file.decoded, self._budget)
        found.storages = self.file.storages
        return found


class SafetensorsContainer(FileContainer):
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


class FolderContainer(Container):
    """A folder that torch.distributed.checkpoint saved to.

    Attributes:
        path: its path.
        metadata_files: names of the files that complete a checkpoint: one, or one of each rank.
            Where there is one of all ranks, torch loads no other.
        shards: names of the files with items.
        sizes: bytes of these files, None if one was removed meanwhile.
        version: what distinguishes the metadata files from those that replace them.
    """

    format = Format.DCP.value

    def __init__(self, path: str) -> None:
        """List the folder.

        Raises:
            OSError: it cannot be read.
        """
        self.path = path
        names = sorted(os.listdir(path))
        found = [name for name in names if METADATA_NAME.fullmatch(name)]
        self.metadata_files = [".metadata"] if ".metadata" in found else found
        self.shards = [name for name in names if name.endswith(".distcp")]
        files = (*self.metadata_files, *self.shards)
        states = {name: _state(os.path.join(path, name)) for name in files}
        self.sizes = {name: one.st_size if one else None for name, one in states.items()}
        some = [(name, states[name]) for name in self.metadata_files]
        self.version = [
            (name, (one.st_ino, one.st_mtime_ns) if one else None) for name, one in some
        ]
        self.nbytes = sum(size or 0 for size in self.sizes.values())

    def read_metadata(self, name: str) -> Metadata:
        """Return what a metadata file says.

        Raises:
            CorruptCheckpointError: it is damaged.
            UnreadableCheckpointError: it is no regular file.
            PickleLimitError: it takes too long to read.
            OSError: it cannot be read.
        """
        path = os.path.join(self.path, name)
        return parse(read_regular(path), path)

    @cached_property
    def metadata(self) -> dict[str, Metadata]:
        """What each metadata file says, by its name.

        Raises:
            CorruptCheckpointError: one is damaged, or there is none.
            PickleLimitError, OSError: as `read_metadata`.
        """
        if not self.metadata_files:
            raise CorruptCheckpointError(
                "there is no `.metadata`: a save into this folder was not completed, so nothing "
                "can be loaded",
                path=self.path,
            )
        return {name: self.read_metadata(name) for name in self.metadata_files}

    def of_all_ranks(self) -> Metadata:
        """Return what the metadata file of all ranks says.

        Raises:
            ConvertError: each rank saved a checkpoint of its own.
            CorruptCheckpointError, PickleLimitError, OSError: as `metadata`.
        """
        whole, *others = self.metadata.values()
        if others:
            raise ConvertError(
                f"{self.path}: each rank saved a checkpoint of its own (use_collectives=False): "
                "load it with torch.distributed.checkpoint"
            )
        return whole

    @cached_property
    def outline(self) -> Outline:
        found = Outline()
        for name, metadata in self.metadata.items():
            # ranks with checkpoints of their own may have the same keys
            origin = f", in {name}" if len(self.metadata) > 1 else ""
            for key, stored in metadata.tensors.items():
                if stored.dtype not in ITEM_BYTES:
                    why = f"torch has no dtype {stored.dtype} that is known here"
                    found.unread[key + origin] = why
                    continue
                nbytes = stored.numel * ITEM_BYTES[stored.dtype]
                count = len(stored.chunks)
                kind = ("tensor" if count == 1 else f"in {count} parts") + origin
                stride = contiguous_stride(stored.shape)
                found.tensors.append(
                    TensorEntry(key, stored.dtype, stored.shape, stride, None, 0, nbytes, kind)
                )
            found.globals |= metadata.globals
            found.values += len(metadata.values)
        return found

    def listing(self) -> list[tuple[str, int, int]]:
        return [
            (f"{item.file}: {item.name}", item.offset, item.length)
            for metadata in self.metadata.values()
            for item in metadata.items()
        ]

    def notes(self) -> list[str]:
        return list(islice(self._notes(), _MOST_NOTES))

    def _notes(self) -> Iterator[str]:
        found = self.metadata.values()
        needed = dict.fromkeys(item.file for metadata in found for item in metadata.items())
        if len(found) > 1:
            yield f"{len(found)} ranks, each with a checkpoint of its own"
        for metadata in found:
            yield from (f"{name}: it has no location" for name in metadata.missing())
        for name in needed:
            if self.sizes.get(name) is None:
                yield f"{name}: the file is missing"
        for name in self.shards:
            if name not in needed:
                yield f"{name}: it belongs to no checkpoint that torch loads"
        yield from super().notes()


def _state(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except ours(FileNotFoundError):
        return None


def is_dcp_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that torch.distributed.checkpoint saved to."""
    try:
        found = FolderContainer(os.fspath(path))
    except ours(OSError):
        return False
    return bool(found.shards) or any(
        _begins_like_pickle(os.path.join(found.path, name)) for name in found.metadata_files
    )


def _begins_like_pickle(path: str) -> bool:
    try:
        with Descriptors() as files:
            return os.pread(files.open(path, os.O_RDONLY | os.O_NONBLOCK), 1, 0) == b"\x80"
    except ours(OSError):
        return False


def open_container(
    source: Source, path: str, limits: Limits | None = None, unique: bool = True
) -> Container:
    """Return what a file, or a folder, says of its contents.

    Args:
        source: the file; a folder needs a `DescriptorSource`.
        path: its path, which counts where the first bytes do not decide; errors name it.
        limits: on its pickle.
        unique: as of `ZipContainer`.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is no checkpoint of these formats.
        PickleLimitError: its pickle is larger than the limits.
        OSError: it cannot be read.
    """
    with naming(path):
        found = detect(source, path)
        if found.is_damage:
            raise CorruptCheckpointError(found.value, offset=0)
        if found is Format.ZIP:
            return ZipContainer(source, limits, unique)
        if found is Format.LEGACY:
            return LegacyContainer(source, limits)
        if found is Format.SAFETENSORS:
            return SafetensorsContainer(source)
        if found is Format.DCP:
            return FolderContainer(path)
        raise UnreadableCheckpointError(found.value)


def format_of_head(source: Source) -> Format | None:
    """Return the format that a file's first bytes show, None if they show none.

    A zip is recognized as torch does it.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        head = source.read_at(0, min(_MAGIC_AT_MOST, source.size))
    except ours(
        TruncatedCheckpointError
    ):  # a log that was emptied meanwhile, a file of the kernel's
        return None
    if head.startswith(LOCAL_SIGNATURE):
        return Format.ZIP
    try:
        value = decode(ByteStream(BytesSource(head))).value
    except ours(CheckpointFileError):
        return None
    return Format.LEGACY if type(value) is int and value == MAGIC else None


def detect(source: Source, name: str) -> Format:
    """Return what a file, or a folder, is.

    Args:
        source: the file; of a folder, or a special file, a `DescriptorSource`.
        name: its path.

    Raises:
        OSError: the file cannot be read.
    """
    if isinstance(source, DescriptorSource):
        mode = source.mode
        if stat.S_ISDIR(mode):
            return Format.DCP if is_dcp_folder(name) else Format.FOLDER
        if not stat.S_ISREG(mode):
            return Format.SPECIAL
    if not source.size:
        return Format.EMPTY
    if name.endswith(".distcp"):
        return Format.SHARD
    head = format_of_head(source)
    if head is not None:
        return head
    if isinstance(source, DescriptorSource) and source.has_only_zeros():
        return Format.ZEROS
    if name.endswith(".safetensors"):
        return Format.SAFETENSORS
    try:
        read_directory(source, headers=False)
    except ours(CheckpointFileError):
        return Format.OTHER
    return Format.DAMAGED_ZIP
