"""The source of a conversion: a file, or safetensors files with an index, mapped and not read.

The objects have storages in a mapping of the file, which take no memory. Unpickling follows torch's
rules for `weights_only=True`. The address of a storage in the mapping gives its offset in the file.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import _weights_only_unpickler

from fastserial.checkpoints.convert import FileMemory
from fastserial.checkpoints.tensor_read import is_little_endian
from fastserial.checkpoints.verify import refuse_damaged
from fastserial.checkpoints.verify.file_list import read_index
from fastserial.config import Config
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
from fastserial.formats.outline import bounded_pickle
from fastserial.formats.safetensors import ONE_FILE
from fastserial.formats.source import DescriptorSource, naming
from fastserial.formats.zip_format import PICKLE, RecordEntry
from fastserial.interrupts import Descriptors, finish_after, ours, suppress
from fastserial.loading.unpickler import unpickler_module
from fastserial.memory.storages import Memory, new_storage
from fastserial.patching.install import get_original

_INDEX_SUFFIX = ".safetensors.index.json"
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
        container = open_container(DescriptorSource(fd), path)
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
    pickled = directory.find(PICKLE)
    if pickled is None or directory.find("constants.pkl") is not None:
        raise ConvertError(
            f"{path}: not a checkpoint of torch.save: it is a TorchScript archive, or has no "
            "data.pkl"
        )
    for record in directory.records:
        if record.name.startswith("data/") and not record.is_stored:
            raise ConvertError(
                f"{path}: record {record.name} is compressed: load and save it with torch"
            )
    load = get_original("_load")
    more = {"weights_only": True} if "weights_only" in inspect.signature(load).parameters else {}
    reader = torch._C.PyTorchFileReader(f"/proc/self/fd/{fd}")
    _know_dtensors(bounded_pickle(source, pickled))
    with _unpickling(path), _without_groups():
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
        with suppress(ImportError):  # of a torch without torch.distributed
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
def _unpickling(path: str) -> Iterator[None]:
    """Explain why torch refuses a pickle."""
    try:
        yield
    except ours(pickle.UnpicklingError) as error:
        raise ConvertError(
            f"{path}: weights_only does not allow it: if you trust the file, load it with "
            f"torch.load(..., weights_only=False) and save it again ({error})"
        ) from error
    except (FastserialError, OSError, MemoryError):
        raise
    except ours(Exception) as error:  # what torch raises for a damaged or hostile pickle
        what = str(error).partition("\n")[0]
        raise ConvertError(
            f"{path}: torch cannot rebuild its contents: {type(error).__name__}: {what}"
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
    slices = _Slices(whole)
    for key, why in container.outline.unread.items():
        raise ConvertError(f"entry {key!r}: {why}")
    for entry in container.outline.tensors:
        dtype = getattr(torch, entry.dtype, None)
        if dtype is None:
            raise ConvertError(f"entry {entry.key!r}: this torch has no {entry.dtype}")
        empty = torch.empty(0, dtype=dtype)
        start = container.offset_of(entry)
        storage = slices[start : start + entry.nbytes]
        try:
            tensors[entry.key] = empty.set_(storage, 0, entry.shape, entry.stride)
        except ours(RuntimeError, TypeError) as error:  # sizes or strides beyond 64 bits
            raise ConvertError(
                f"entry {entry.key!r}: torch can make no tensor of its shape"
            ) from error
    return tensors


def _map_legacy(fd: int, path: str, container: LegacyContainer, whole: torch.UntypedStorage) -> Any:
    file = container.file
    slices = _Slices(whole)
    made: dict[str, torch.UntypedStorage] = {}
    typed: Any = torch.storage.TypedStorage

    def persistent_load(pid: Any) -> Any:
        match pid:
            case ("storage", storage_type, str(key), _, _, None) if key in file.storages:
                if key not in made:
                    entry = file.storages[key]
                    start = entry.offset or 0
                    made[key] = slices[start : start + entry.held]
                return typed(wrap_storage=made[key], dtype=storage_type.dtype, _internal=True)
        raise pickle.UnpicklingError("it refers to something else than a whole storage")

    with open(f"/proc/self/fd/{fd}", "rb") as stream:
        stream.seek(file.object_offset)
        unpickler: Any = _weights_only_unpickler.Unpickler(stream, encoding="utf-8")
        unpickler.persistent_load = persistent_load
        with _unpickling(path):
            return unpickler.load()


def check_source(name: str, fd: int | None = None, config: Config | None = None) -> None:
    """Verify what is converted: damage would become a whole file, with checksums or without.

    Args:
        name, fd, config: as for `refuse_damaged`.

    Raises:
        CorruptCheckpointError: it is damaged.
        ConvertError: a part of it cannot be checked.
    """
    report = refuse_damaged(name, fd, config)
    if report.status == "unchecked":
        raise ConvertError(
            f"{name}: {'; '.join(report.notes)}; verify=False (--no-verify) converts it unchecked"
        )


class MappedSource:
    """Files that are mapped."""

    def __init__(self, container: str, verify: bool) -> None:
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
            check_source(name, fd)
        mapped = map_checkpoint(fd, name)
        if isinstance(mapped.file, SafetensorsContainer):
            self.metadata.update(mapped.file.metadata)
        self._maps.append((fd, mapped, before, name))
        return mapped

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return where bytes of a storage come from, None if it is in no mapping."""
        for fd, mapped, _, _ in self._maps:
            offset = mapped.offset_of(storage)
            if offset is not None:
                return FileMemory(fd, offset + start, nbytes)
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


def open_source(name: str, verify: bool) -> MappedSource:
    """Open a file, or safetensors files with an index: given that, or the folder.

    Args:
        name: its path.
        verify: check every checksum first.

    Raises:
        ConvertError: the pickle needs more than `weights_only` allows, or a part cannot be checked.
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
            whole = os.path.join(name, ONE_FILE)
            mapped = source.add(whole if os.path.exists(whole) else name)
            source.container, source.value = mapped.container, mapped.value
    except BaseException as error:
        finish_after(error, source.close)
        raise
    return source


def _index_of(name: str) -> str | None:
    """Return the path of the index, None if it is none."""
    if name.endswith(_INDEX_SUFFIX):
        return name
    if not os.path.isdir(name):
        return None
    found = [one for one in sorted(os.listdir(name)) if one.endswith(_INDEX_SUFFIX)]
    if len(found) > 1:
        raise ConvertError(f"{name}: there are several indices: give one of {', '.join(found)}")
    return os.path.join(name, found[0]) if found else None


def _all_of(source: MappedSource, index: str) -> dict[str, torch.Tensor]:
    """Return the tensors of all files that an index names, which are mapped."""
    tensors: dict[str, torch.Tensor] = {}
    for name, keys in read_index(index).items():
        found = source.add(os.path.join(os.path.dirname(index), name)).value
        for key in keys:
            if key not in found:
                raise CorruptCheckpointError(f"{name} has no tensor {key!r}", path=index)
            tensors[key] = found[key]
    return tensors
