"""Writing the files of `fastserial.convert`, streamed from the source.

Pickles are read under torch's `weights_only` rules. Storages are never loaded: the writer reads
their bytes from the source while it fills its staging buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from fastserial.checkpoints.tensor_read import is_dense, overlapping
from fastserial.config import Config
from fastserial.errors import ConvertError
from fastserial.files.durable import make_folder, replace_bytes
from fastserial.formats.extents import storage_extents
from fastserial.formats.safetensors import (
    INDEX,
    file_order,
    header_bytes,
    index_bytes,
    is_writable,
    split,
)
from fastserial.formats.source import read_to
from fastserial.formats.zip_layout import archive_name
from fastserial.memory.storages import HostMemory, Memory, batch_of, memmove, storage_memory
from fastserial.patching.install import get_original, patched
from fastserial.saving.archive import ZipArchive
from fastserial.saving.writer import FastFileWriter

_PROTOCOL = 2  # torch's default


class ConvertSource(Protocol):
    """What is converted: a value whose bytes are in files, not in its memory.

    Attributes:
        container: the name of its format.
        value: what was saved.
        metadata: free text (safetensors).
    """

    container: str
    value: Any
    metadata: dict[str, str]

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return the source of a storage's bytes, None if they are in its memory."""

    def check_unchanged(self) -> None:
        """Raise if it was written to since it was opened.

        Raises:
            CorruptCheckpointError: it was.
        """

    def close(self) -> None:
        """Close its files; its objects must not be used any more."""


class FileMemory:
    """`nbytes` bytes at `offset` of a file, in the interface of a storage's memory."""

    __slots__ = ("_fd", "_offset", "nbytes")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._fd = fd
        self._offset = offset
        self.nbytes = nbytes

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Read bytes [start, start + length) into host memory at `address`."""
        view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        read_to(view, self._fd, self._offset + start)


class _ElementsInOrder:
    """A tensor's elements in their order: a copy, made when it is first read, up to its end."""

    __slots__ = ("_copy", "_tensor", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copy: torch.Tensor | None = None
        self.nbytes = tensor.numel() * tensor.itemsize

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        made = self._copy
        if made is None:
            made = self._copy = self._tensor.resolve_conj().resolve_neg().contiguous()
        memmove(address, made.data_ptr() + start, length)
        if start + length == self.nbytes:
            self._copy = None


class _StreamArchive(ZipArchive):
    """A zip whose storages come from a source."""

    def __init__(self, writer: FastFileWriter, source: ConvertSource) -> None:
        super().__init__(writer, archive_name(writer.name) or "archive", owns_writer=False)
        self._source = source

    def write_record(
        self, name: str, data: str | bytes | int | torch.UntypedStorage, size: int
    ) -> None:
        if isinstance(data, torch.UntypedStorage):
            self.add_storages([data], [name])
        else:
            super().write_record(name, data, size)

    def add_storages(self, storages: Sequence[torch.UntypedStorage], names: Sequence[str]) -> None:
        for name, storage in zip(names, storages, strict=True):
            nbytes = storage.nbytes()
            found = self._source.part_of(storage, 0, nbytes) if nbytes else None
            self._add_memory(name, storage_memory(storage) if found is None else found)


def write_zip(value: Any, writer: FastFileWriter, source: ConvertSource) -> None:
    """Write what `torch.save` writes."""
    save = patched("_save") or get_original("_save")
    with _StreamArchive(writer, source) as archive:
        save(value, archive, pickle, _PROTOCOL, False)


def write_safetensors(
    tensors: Mapping[str, torch.Tensor],
    writer: FastFileWriter,
    source: ConvertSource,
    metadata: Mapping[str, str],
) -> None:
    """Write tensors and free text as one safetensors file."""
    order = file_order({key: type_name(tensor) for key, tensor in tensors.items()})
    memories = [_elements_of(tensors[key], source) for key in order]
    rows = [
        (key, type_name(tensors[key]), tuple(tensors[key].shape), memory.nbytes)
        for key, memory in zip(order, memories, strict=True)
    ]
    writer.write(header_bytes(rows, metadata))
    extents = storage_extents(batch_of(memories), [b""] * len(memories))
    writer.write_layout(extents, sum(memory.nbytes for memory in memories))


def type_name(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype, such as `float32`."""
    return name_of(tensor.dtype)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def flat_tensors(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a flat dictionary.

    Raises:
        ConvertError: it holds anything else.
    """
    if not isinstance(value, Mapping):
        raise ConvertError(
            f"safetensors holds a dictionary of tensors, nothing of type {type(value).__name__}"
        )
    found: dict[str, torch.Tensor] = {}
    for key, item in value.items():
        problem = None
        if not isinstance(key, str):
            problem = f"its key is of type {type(key).__name__}, not a string"
        elif _is_no_unicode(key):
            problem = "its key is no valid Unicode (a lone surrogate)"
        elif isinstance(item, Mapping):
            problem = "it is a dictionary"
        elif type(item) not in (torch.Tensor, torch.nn.Parameter):
            problem = f"it is of type {type(item).__name__}, not a tensor"
        elif item.layout is not torch.strided or item.is_quantized or item.is_nested:
            problem = "it is no plain tensor"
        elif item.device.type != "cpu":
            problem = f"it has no bytes (device {item.device.type})"
        elif not is_writable(type_name(item), item.shape):
            problem = f"safetensors has no {type_name(item)} of shape {list(item.shape)}"
        if problem:
            raise ConvertError(
                f"entry {key!r} cannot be represented in safetensors: {problem}; to convert the "
                "tensors in one entry alone: key= (--key)"
            )
        found[key] = cast("torch.Tensor", item).detach()
    return found


def _is_no_unicode(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if tensors share memory, or elements of one do.

    Raises:
        ConvertError: two do.
    """
    for key, tensor in tensors.items():
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ConvertError(
                f"several elements of entry {key!r} are one in memory (expand), which safetensors "
                "cannot hold; copy_shared=True (--copy-shared) writes each of them"
            )
    pair = overlapping(tensors.items())
    if pair is not None:
        raise ConvertError(
            f"entries {pair[0]!r} and {pair[1]!r} share memory, which safetensors cannot hold; "
            "copy_shared=True (--copy-shared) writes them twice"
        )


def _elements_of(tensor: torch.Tensor, source: ConvertSource) -> Memory:
    """Return a tensor's bytes in the order of its elements."""
    if not tensor.numel():
        return HostMemory(0, 0, None)
    lazy = tensor.is_conj() or tensor.is_neg()
    nbytes = tensor.numel() * tensor.itemsize
    if lazy or not (tensor.is_contiguous() and is_dense(tensor)):
        return _ElementsInOrder(tensor)
    start = int(tensor.storage_offset()) * tensor.itemsize
    found = source.part_of(tensor.untyped_storage(), start, nbytes)
    return HostMemory(tensor.data_ptr(), nbytes, tensor) if found is None else found


_SHOWN_KEYS = 8


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` did.

    Attributes:
        source, target: the containers of both sides.
        nbytes: size of the new file, or of the new files.
        dropped: names of the source's metadata (safetensors) that a file of torch cannot hold;
            empty between two safetensors files, which keep it.
    """

    source: str
    target: str
    nbytes: int
    dropped: tuple[str, ...] = ()


def container_of(target: str, to: str | None, shard_nbytes: int | None) -> str:
    """Return the container in which a target is written.

    Raises:
        ConvertError: it cannot be written; or `shard_nbytes` is none, or it has no shards.
    """
    if to not in (None, "zip", "safetensors", "dcp"):
        raise ConvertError(
            f"convert writes zip, safetensors and dcp, not {to!r}; for the legacy format: "
            "torch.save(torch.load(...), target, _use_new_zipfile_serialization=False)"
        )
    if shard_nbytes is None:
        return to or ("safetensors" if target.endswith(".safetensors") else "zip")
    if to not in (None, "safetensors") or shard_nbytes <= 0:
        raise ConvertError("shard_nbytes is the most bytes of one of several safetensors files")
    return "safetensors"


def write_source(
    opened: ConvertSource,
    path: str,
    to: str,
    *,
    key: str,
    copy_shared: bool,
    shard_nbytes: int | None,
    config: Config,
) -> Converted:
    """Write the value under a key of an open source to a file, or to a folder of shards.

    Raises:
        ConvertError, CorruptCheckpointError, WriteError: as `convert`.
    """
    value = part_of(opened.value, key)
    free = opened.metadata
    if to == "zip":
        with _writing(path, opened, to, config) as writer:
            write_zip(value, writer, opened)
        dropped = tuple(name for name in free if name != "format")
        return Converted(opened.container, to, writer.tell(), dropped)
    tensors = flat_tensors(value)
    if not copy_shared:
        refuse_shared(tensors)
    text = {"format": "pt", **free}
    if shard_nbytes is None:
        nbytes = _write_safetensors(tensors, opened, path, text, config)
    else:
        nbytes = _write_shards(tensors, opened, path, shard_nbytes, text, config)
    return Converted(opened.container, to, nbytes)


@contextlib.contextmanager
def _writing(path: str, source: ConvertSource, to: str, config: Config) -> Iterator[FastFileWriter]:
    """Open a writer; the file is completed if the source is what it was when it was opened."""
    with FastFileWriter(path, config, container=to) as writer:
        yield writer
        writer.release_sources()
        source.check_unchanged()


def _write_safetensors(
    tensors: Mapping[str, torch.Tensor],
    source: ConvertSource,
    path: str,
    metadata: Mapping[str, str],
    config: Config,
) -> int:
    with _writing(path, source, "safetensors", config) as writer:
        write_safetensors(tensors, writer, source, metadata)
    return writer.tell()


def part_of(value: Any, key: str) -> Any:
    """Return the value under a key; names in it may contain dots, the longest that fits counts.

    Raises:
        ConvertError: there is none; says how far the path resolves, and which names exist there.
    """
    where = "it"
    rest = key or None
    while rest is not None:
        entries: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
        entries = enumerate(value) if isinstance(value, list | tuple) else entries
        text_last = sorted(entries, key=lambda entry: isinstance(entry[0], str))
        inside = {str(name): item for name, item in text_last}
        fitting = [name for name in inside if f"{rest}.".startswith(f"{name}.")]
        if not fitting:
            names = ", ".join(map(repr, itertools.islice(inside, _SHOWN_KEYS)))
            more = ", ..." if len(inside) > _SHOWN_KEYS else ""
            offers = f"; there are: {names}{more}" if inside else ""
            raise ConvertError(f"there is no {rest!r} in {where}{offers}")
        name = max(fitting, key=len)
        value = inside[name]
        rest = rest[len(name) + 1 :] if len(rest) > len(name) else None
        where = repr(key if rest is None else key[: len(key) - len(rest) - 1])
    return value


def _write_shards(
    tensors: Mapping[str, torch.Tensor],
    source: ConvertSource,
    folder: str,
    nbytes: int,
    metadata: Mapping[str, str],
    config: Config,
) -> int:
    """Write the files of `save_pretrained` to a new folder; last the index, which completes it.

    Args:
        source: the source of their bytes.
        nbytes: most bytes of tensors in a file, unless one tensor has more.
        metadata: free text, for each file.

    Returns:
        The bytes of all files.

    Raises:
        ConvertError: the folder is not empty.
        WriteError: it cannot be written.
    """
    sizes = {key: tensor.numel() * tensor.itemsize for key, tensor in tensors.items()}
    files = split(sizes, nbytes)
    make_folder(folder, config.durable)
    if os.listdir(folder):
        raise ConvertError(f"{folder}: it is not empty: give a new folder")
    total = 0
    for name, keys in files.items():
        path, shard = os.path.join(folder, name), {key: tensors[key] for key in keys}
        total += _write_safetensors(shard, source, path, metadata, config)
    if len(files) > 1:
        parameters = sum(tensor.numel() for tensor in tensors.values())
        index = index_bytes(files, sum(sizes.values()), parameters)
        replace_bytes(os.path.join(folder, INDEX), index, config.durable)
        total += len(index)
    return total
