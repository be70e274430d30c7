"""Writing objects whose bytes come from other files: the writer reads them as it needs them."""

from __future__ import annotations

import ctypes
import io
import pickle
import shlex
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from fastserial.checkpoints.tensor_read import is_dense, overlapping
from fastserial.config import Config
from fastserial.errors import ConvertError
from fastserial.formats.extents import Data, Extent
from fastserial.formats.legacy.layout import element_counts, storage_extents
from fastserial.formats.safetensors import TYPE_NAMES, header_bytes
from fastserial.formats.source import read_to
from fastserial.formats.zip.layout import archive_name
from fastserial.memory.storages import HostMemory, Memory, batch_of, storage_memory
from fastserial.patching.install import get_original, patched
from fastserial.saving.archive import ZipArchive
from fastserial.saving.writer import FastFileWriter

__all__ = [
    "FileMemory",
    "StorageLocator",
    "StreamWriter",
    "elements_of",
    "flat_tensors",
    "memory_of",
    "refuse_shared",
    "write_legacy",
    "write_safetensors",
    "write_zip",
]

_PROTOCOL = 2  # torch's default


class StorageLocator(Protocol):
    """Locates the bytes of storages and tensors whose memory is not read."""

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return the source of a storage's bytes, None if they are in its memory."""

    def in_order(self, tensor: torch.Tensor) -> Memory | None:
        """Return the source of a non-contiguous tensor's bytes, None if they are in its memory."""


def memory_of(locator: StorageLocator, storage: torch.UntypedStorage) -> Memory:
    """Return the source of a storage's bytes."""
    nbytes = storage.nbytes()
    found = locator.part_of(storage, 0, nbytes) if nbytes else None
    return storage_memory(storage) if found is None else found


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


class _OrderedMemory:
    """The elements of a non-contiguous tensor in order, copied as they are needed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.numel() * tensor.itemsize
        self._tensor = tensor

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) of the contiguous form to `address`."""
        size = self._tensor.itemsize
        first, last = start // size, -(-(start + length) // size)
        elements = torch.empty(last - first, dtype=self._tensor.dtype, device="cpu")
        _gather(self._tensor, first, elements)
        ctypes.memmove(address, elements.data_ptr() + start - first * size, length)


def _gather(tensor: torch.Tensor, first: int, target: torch.Tensor) -> None:
    """Copy a tensor's elements in order, from the first one on, until the target is full."""
    if not tensor.dim() or tensor.numel() == target.numel():
        target.view(tensor.shape).copy_(tensor)
        return
    row = tensor.numel() // tensor.shape[0]
    done = 0
    while done < target.numel():
        at, inside = divmod(first + done, row)
        count = (target.numel() - done) // row
        if inside or not count:  # the end of a row, or its beginning
            part = target[done : done + row - inside]
            _gather(tensor[at], inside, part)
        else:
            part = target[done : done + count * row]
            part.view(count, *tensor.shape[1:]).copy_(tensor[at : at + count])
        done += part.numel()


class StreamWriter(FastFileWriter):
    """A writer that takes storages from the source file, not from the mapping."""

    def __init__(self, path: str, config: Config, locator: StorageLocator, to: str) -> None:
        super().__init__(path, config, container=to)
        self.locator = locator

    def save_torch_storage_object_list(
        self,
        storage_obj_list: Sequence[tuple[torch.UntypedStorage, torch.dtype]],
        save_size: bool = True,
    ) -> int:
        batch = batch_of([memory_of(self.locator, storage) for storage, _ in storage_obj_list])
        element_sizes = [dtype.itemsize for _, dtype in storage_obj_list]
        counts = element_counts(batch.sizes, element_sizes, save_size)
        extents = storage_extents(batch, counts)
        self.write_extents(extents)
        return sum(extent.length for extent in extents)

    def write_extents(self, extents: Sequence[Extent]) -> None:
        """Append extents without checksums."""
        self.write_layout(extents, sum(extent.length for extent in extents))


class _StreamArchive(ZipArchive):
    """A zip whose storages come from the source."""

    def __init__(self, writer: StreamWriter, archive: str) -> None:
        super().__init__(writer, archive, owns_writer=False)
        self._locator = writer.locator

    def write_record(
        self, name: str, data: str | bytes | int | torch.UntypedStorage, size: int
    ) -> None:
        if isinstance(data, torch.UntypedStorage):
            self._add_memory(name, memory_of(self._locator, data))
        else:
            super().write_record(name, data, size)

    def add_storages(self, storages: Sequence[torch.UntypedStorage], names: Sequence[str]) -> None:
        for name, storage in zip(names, storages, strict=True):
            self._add_memory(name, memory_of(self._locator, storage))


def write_zip(value: Any, writer: StreamWriter) -> None:
    """Write what `torch.save` writes."""
    save = patched("_save") or get_original("_save")
    with _StreamArchive(writer, archive_name(writer.name) or "archive") as archive:
        save(value, archive, pickle, _PROTOCOL, False)


def write_legacy(value: Any, writer: StreamWriter) -> None:
    """Write what `torch.save(..., _use_new_zipfile_serialization=False)` writes.

    Raises:
        ConvertError: the container cannot hold it.
    """
    _refuse_in_legacy(value)
    # without a patch torch copies the storages from the mapping: the same bytes, more memory
    save = patched("_legacy_save") or get_original("_legacy_save")
    save(value, writer, pickle, _PROTOCOL)


class _LegacyProbe(pickle.Pickler):
    """Pickles into nothing, and raises for what a legacy file cannot hold."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), _PROTOCOL)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            raise ConvertError("it has a dtype without a storage type, such as float8 or uint16")
        return "storage" if isinstance(obj, torch.storage.TypedStorage) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_nested and obj.layout is torch.strided:
            raise ConvertError("a nested tensor needs its sizes while it is unpickled")
        return NotImplemented


def _refuse_in_legacy(value: Any) -> None:
    for key, item in value.items() if type(value) in (dict, OrderedDict) else [("", value)]:
        try:
            _LegacyProbe().dump(item)
        except ConvertError as error:
            where = f"entry {key!r}" if key != "" else "it"
            raise ConvertError(
                f"{where} cannot be represented in the legacy container: {error}"
            ) from None


def write_safetensors(
    tensors: Mapping[str, torch.Tensor], writer: StreamWriter, metadata: Mapping[str, str]
) -> None:
    """Write tensors and free text as one safetensors file."""
    # large elements first: all are aligned then, as the format wants it
    order = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    rows = [
        (key, _type_name(tensor), tuple(tensor.shape), tensor.numel() * tensor.itemsize)
        for key, tensor in order
    ]
    writer.write(header_bytes(rows, metadata))
    extents: list[Extent] = []
    at = 0
    for _, tensor in order:
        memory = elements_of(tensor, writer.locator)
        if memory.nbytes:
            extents.append(Extent(at, memory.nbytes, Data(memory, memory.nbytes, None)))
            at += memory.nbytes
    writer.write_extents(extents)


def _type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
        elif _type_name(item) not in TYPE_NAMES:
            problem = f"safetensors has no dtype {_type_name(item)}"
        if problem:
            raise ConvertError(
                f"entry {key!r} cannot be represented in safetensors: {problem}{_advice(value)}"
            )
        found[key] = cast("torch.Tensor", item).detach()
    return found


def _is_no_unicode(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _advice(value: Mapping[Any, Any]) -> str:
    """Suggest the entry with the most tensors."""
    counts = {
        key: sum(isinstance(one, torch.Tensor) for one in item.values())
        for key, item in value.items()
        if isinstance(key, str) and isinstance(item, Mapping)
    }
    best = max(counts, key=lambda key: counts[key], default="")
    if not counts.get(best):
        return ""
    return f"; to convert the tensors in {best!r} alone: key={best!r} (--key {shlex.quote(best)})"


def refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if tensors share memory.

    Raises:
        ConvertError: two do.
    """
    pair = overlapping(tensors.items())
    if pair is not None:
        raise ConvertError(
            f"entries {pair[0]!r} and {pair[1]!r} share memory, which safetensors cannot hold; "
            "copy_shared=True (--copy-shared) writes them twice"
        )


def elements_of(tensor: torch.Tensor, locator: StorageLocator) -> Memory:
    """Return a tensor's bytes in the order of its elements."""
    if not tensor.numel():
        return HostMemory(0, 0, None)
    lazy = tensor.is_conj() or tensor.is_neg()
    if lazy or not (tensor.is_contiguous() and is_dense(tensor)):
        return locator.in_order(tensor) or cast("Memory", _OrderedMemory(tensor))
    nbytes = tensor.numel() * tensor.itemsize
    start = int(tensor.storage_offset()) * tensor.itemsize
    found = locator.part_of(tensor.untyped_storage(), start, nbytes)
    return HostMemory(tensor.data_ptr(), nbytes, tensor) if found is None else found
