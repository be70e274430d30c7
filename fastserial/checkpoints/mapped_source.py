"""The source of a conversion: a file, or safetensors files with an index, mapped and not read.

The objects have storages in a mapping of the file, which take no memory. Unpickling follows torch's
rules for `weights_only=True`. The address of a storage in the mapping gives its offset in the file.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import _weights_only_unpickler

from fastserial.checkpoints.streaming import FileMemory, StorageLocator
from fastserial.checkpoints.tensor_read import is_little_endian
from fastserial.checkpoints.verify import refuse_damaged
from fastserial.errors import (
    ConvertError,
    CorruptCheckpointError,
    FastserialError,
    UnreadableCheckpointError,
)
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.container import (
    Container,
    LegacyContainer,
    SafetensorsContainer,
    ZipContainer,
    open_container,
)
from fastserial.formats.pickles import refuse_nested
from fastserial.formats.source import naming
from fastserial.formats.zip.directory import RecordEntry
from fastserial.formats.zip.records import PICKLE, read_record
from fastserial.formats.zip.structs import MOST_INFLATED
from fastserial.interrupts import Descriptors
from fastserial.loading.unpickler import unpickler_module
from fastserial.memory.storages import Memory, new_storage
from fastserial.patching.install import get_original

__all__ = ["INDEX", "ConvertSource", "Mapped", "MappedSource", "map_checkpoint", "open_source"]

INDEX = ".safetensors.index.json"
_MOST_INDEX = 1 << 30  # bytes
_PROTOCOL = 2  # torch's default
_DTENSORS = b"torch.distributed.tensor"
_BIG_ENDIAN = "the file was written on a big-endian machine: load and save it with torch"


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapped checkpoint.

    Attributes:
        file: what the file says of its contents.
        value: what was saved.
        whole: the mapping of the file.
        records: of a zip, by the offset of their data; None: all offsets were checked before.
    """

    file: Container
    value: Any
    whole: torch.UntypedStorage
    records: dict[int, RecordEntry] | None

    @property
    def container(self) -> str:
        """`zip`, `legacy` or `safetensors`."""
        return self.file.format

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return a storage's offset in the file (bytes), None if it is not in the mapping.

        Raises:
            CorruptCheckpointError: it is larger than its record.
        """
        offset, nbytes = storage.data_ptr() - self.whole.data_ptr(), storage.nbytes()
        if offset < 0 or offset + nbytes > self.whole.nbytes():
            return None
        if self.records is not None and nbytes:
            record = self.records.get(offset)
            if record is None or nbytes > record.size:
                raise CorruptCheckpointError(
                    f"the pickle asks for {nbytes} bytes at {offset}, where no such record is"
                )
        return offset


def map_checkpoint(fd: int, path: str) -> Mapped:
    """Map a checkpoint and unpickle it.

    Args:
        fd: a descriptor of the file; it must stay as it is while the objects are used.
        path: its name, for errors.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is no checkpoint.
        ConvertError: its pickle needs more than `weights_only` allows, or it cannot be mapped.
        OSError: it cannot be read.
    """
    with naming(path):
        container = open_container(fd, path)
        if not isinstance(container, ZipContainer | LegacyContainer | SafetensorsContainer):
            what = "a folder of torch.distributed.checkpoint: load it with dcp.load, or convert it"
            raise UnreadableCheckpointError(what)
        size = container.source.size
        whole = cast(
            "torch.UntypedStorage",
            torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", False, size),
        )
        records = None
        if not is_little_endian(container):
            raise ConvertError(_BIG_ENDIAN)
        if isinstance(container, ZipContainer):
            value = _map_zip(fd, path, container, whole)
            records = {record.data_offset: record for record in container.records}
        elif isinstance(container, LegacyContainer):
            value = _map_legacy(fd, path, container, whole)
        else:
            value = _map_safetensors(container, whole)
    return Mapped(container, value, whole, records)


def _map_zip(fd: int, path: str, container: ZipContainer, whole: torch.UntypedStorage) -> Any:
    source, directory = container.source, container.directory
    if directory.find("constants.pkl") is not None:
        raise ConvertError(f"{path}: a TorchScript archive is no checkpoint of torch.save")
    pickled = directory.find(PICKLE)
    if pickled is None:
        raise ConvertError(
            f"{path}: the archive holds no data.pkl: it is no checkpoint of torch.save, but for "
            "instance of torch.package or torch.export"
        )
    storages = (record for record in directory.records if record.name.startswith("data/"))
    packed = next((record for record in storages if not record.is_stored), None)
    if packed is not None:
        raise ConvertError(
            f"{path}: record {packed.name} is compressed: load and save it with torch"
        )
    load = get_original("_load")
    more = {"weights_only": True} if "weights_only" in inspect.signature(load).parameters else {}
    reader = torch._C.PyTorchFileReader(f"/proc/self/fd/{fd}")
    data = read_record(source, pickled, source.size * MOST_INFLATED)
    refuse_nested(data)
    _know_dtensors(data)
    with _unpickling(data[:2], path), _without_groups():
        return load(
            reader,
            "cpu",
            unpickler_module(_weights_only_unpickler),
            overall_storage=_Slices(whole),
            encoding="utf-8",
            **more,
        )


def _know_dtensors(pickled: bytes) -> None:
    """Import what a pickle of DTensors needs: only then does `weights_only` allow them."""
    if _DTENSORS in pickled:
        with contextlib.suppress(ImportError):  # of a torch without torch.distributed
            importlib.import_module(_DTENSORS.decode())


@contextlib.contextmanager
def _without_groups() -> Iterator[None]:
    """Silence torch's warning, for each mesh, that its process groups do not exist here."""
    log = logging.getLogger("torch.distributed.device_mesh")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _unpickling(start: bytes, path: str) -> Iterator[None]:
    """Explain why torch refuses a pickle, which begins with an opcode and its protocol."""
    try:
        yield
    except pickle.UnpicklingError as error:
        if start[:1] == pickle.PROTO and start[1] > _PROTOCOL:
            raise ConvertError(
                f"{path}: it was pickled with protocol {start[1]}, which weights_only does not "
                "fully know: if you trust the file, load it with torch.load(..., "
                f"weights_only=False) and save it without pickle_protocol ({error})"
            ) from error
        raise ConvertError(f"{path}: {error}") from error
    except (FastserialError, OSError, MemoryError):
        raise
    except Exception as error:  # what torch raises for a damaged or hostile pickle
        what = str(error).partition("\n")[0]
        raise ConvertError(
            f"{path}: torch cannot make what is in it: {type(error).__name__}: {what}"
        ) from error


class _Slices:
    """Slices of a mapping, as `_load` asks for them.

    Empty ones have memory of their own: torch takes storages with one address for the same.
    """

    def __init__(self, whole: torch.UntypedStorage) -> None:
        self._whole = whole

    def __getitem__(self, part: slice) -> torch.UntypedStorage:
        if part.start == part.stop:
            return new_storage(0)
        return cast("torch.UntypedStorage", self._whole[part])


def _map_safetensors(
    container: SafetensorsContainer, whole: torch.UntypedStorage
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for key, why in container.outline.unread.items():
        raise ConvertError(f"entry {key!r}: {why}")
    for entry in container.outline.tensors:
        empty = torch.empty(0, dtype=getattr(torch, entry.dtype))
        start = container.offset_of(entry)
        storage = whole[start : start + entry.nbytes]
        try:
            tensors[entry.key] = empty.set_(storage, 0, entry.shape, entry.stride)
        except (RuntimeError, TypeError) as error:  # sizes or strides beyond 64 bits
            raise ConvertError(
                f"entry {entry.key!r}: torch can make no tensor of its shape"
            ) from error
    return tensors


def _map_legacy(fd: int, path: str, container: LegacyContainer, whole: torch.UntypedStorage) -> Any:
    file = container.file
    ranges = {
        key: (storage.offset or 0, (storage.offset or 0) + storage.held)
        for key, storage in file.storages.items()
    }
    slices = _Slices(whole)
    known: dict[Any, torch.storage.TypedStorage] = {}

    def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
        kind: Any = torch.storage.TypedStorage
        return cast(
            "torch.storage.TypedStorage", kind(wrap_storage=storage, dtype=dtype, _internal=True)
        )

    def persistent_load(pid: Any) -> Any:
        kind, *data = pid
        if type(kind) is not str or kind != "storage":
            raise pickle.UnpicklingError("weights_only allows no entries but storages")
        storage_type, key, _, _, view = data
        dtype = storage_type.dtype
        if type(key) is not str:
            raise pickle.UnpicklingError("the key of a storage is no string")
        begin, end = ranges[key]
        if (key, dtype) not in known:
            known[key, dtype] = typed(slices[begin:end], dtype)
        root = known[key, dtype]
        if view is None:
            return root
        view_key, first, count = view
        if type(view_key) is not str or type(first) is not int or type(count) is not int:
            raise pickle.UnpicklingError("a part of a storage is none")
        if view_key not in known:
            start = begin + first * dtype.itemsize
            stop = min(end, start + count * dtype.itemsize)
            known[view_key] = typed(slices[start:stop], dtype)
        return known[view_key]

    with open(f"/proc/self/fd/{fd}", "rb") as stream:
        stream.seek(file.object_offset)
        unpickler: Any = _weights_only_unpickler.Unpickler(stream, encoding="utf-8")
        unpickler.persistent_load = persistent_load
        with _unpickling(container.source.read_at(file.object_offset, 2), path):
            return unpickler.load()


class ConvertSource(StorageLocator, Protocol):
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
        self._maps.append((fd, mapped, before, name))
        return mapped

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return where bytes of a storage come from, None if it is in no mapping."""
        found = self._locate(storage)
        return None if found is None else FileMemory(found[0], found[2] + start, nbytes)

    def _locate(self, storage: torch.UntypedStorage) -> tuple[int, Mapped, int] | None:
        """Return the file of a storage, and its offset there; None if it is in no mapping."""
        for fd, mapped, _, _ in self._maps:
            offset = mapped.offset_of(storage)
            if offset is not None:
                return fd, mapped, offset
        return None

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
    source = MappedSource("safetensors", verify)
    try:
        index = _index_of(name)
        if index is not None:
            source.value = _all_of(source, index)
        else:
            mapped = source.add(name)
            source.container, source.value = mapped.container, mapped.value
    except BaseException:
        source.close()
        raise
    return source


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


def _all_of(source: MappedSource, index: str) -> dict[str, torch.Tensor]:
    """Return the tensors of all files that an index names, which are mapped."""
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
            raise CorruptCheckpointError(
                f"it names {name!r}, which is not in its folder", path=index
            )
        found = source.add(os.path.join(os.path.dirname(index), name)).value
        for key in keys:
            if key not in found:
                raise CorruptCheckpointError(f"{name} has no tensor {key!r}", path=index)
            tensors[key] = found[key]
    return {key: tensors[key] for key in files}
