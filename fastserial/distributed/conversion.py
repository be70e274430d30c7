"""Folders of torch.distributed.checkpoint as sources and targets of `convert`.

Both are streamed from file to file. The tensors of a folder lie over memory that is never touched:
their bytes are fetched from the ranks' files while they are written.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fastserial.checkpoints.convert import Converted, ConvertSource, part_of
from fastserial.checkpoints.tensor_read import fetch
from fastserial.config import Config, current, options
from fastserial.distributed.dcp.shard_layout import ShardLayout, TensorBytes, bytes_of
from fastserial.distributed.dcp.storage_writer import FastStorageWriter
from fastserial.distributed.layout.boxes import Box, boxes_of_range, intersect
from fastserial.distributed.layout.placement import unloadable
from fastserial.distributed.load.files import StoredFiles
from fastserial.distributed.load.folder_contents import nested, problem_of, values_of
from fastserial.errors import ConvertError, CorruptCheckpointError
from fastserial.formats.container import FolderContainer
from fastserial.formats.dcp import Metadata
from fastserial.formats.stored import Chunk
from fastserial.interrupts import finish, finish_after, ours
from fastserial.loading.reader import OccasionalReader
from fastserial.memory.address_reservation import AddressReservation
from fastserial.memory.storages import HostMemory, Memory
from fastserial.patching.self_check import self_check

_HOST = torch.device("cpu")
_READ_AT_ONCE = 1 << 30  # bytes; no writer asks for as many

# -- a folder as a source --------------------------------------------------------------------------


class _StoredPart(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        box: which part; a last dimension counts the bytes of an element.
        view: a meta tensor with the strides of these dimensions there (bytes).
        file: which file.
        offset: of the first byte there.
    """

    box: Box
    view: torch.Tensor
    file: OccasionalReader
    offset: int


class ChunkedMemory:
    """A tensor's bytes in the order of its elements."""

    def __init__(self, shape: tuple[int, ...], parts: Sequence[_StoredPart]) -> None:
        """Keep where its parts are.

        Args:
            shape: of the tensor; a last dimension counts the bytes of an element.
        """
        self.nbytes = prod(shape)
        self._shape = shape
        self._parts = parts

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Read bytes [start, start + length) into host memory at `address`.

        Raises:
            CorruptCheckpointError: no part has some of them, or a file changed.
            OSError: one cannot be read.
        """
        if not length:
            return
        memory = (ctypes.c_uint8 * length).from_address(address)
        out = torch.frombuffer(memory, dtype=torch.uint8)
        at = found = 0
        for row in boxes_of_range(self._shape, start, start + length):
            into = out[at : at + row.numel].view(row.sizes)
            for box, view, file, offset in self._parts:
                part = intersect(row, box)
                if part is not None:
                    bytes_there = fetch(file, offset, view[part.slices(box)], _HOST)
                    into[part.slices(row)] = bytes_there
                    found += part.numel
            at += row.numel
        if found != length:
            raise CorruptCheckpointError("the parts of a tensor do not make it up")


class FolderSource:
    """A folder, whose state is made without its tensors' bytes."""

    def __init__(self, path: str) -> None:
        """Open a folder.

        Raises:
            ConvertError: a value needs more than `weights_only` allows, an item went through an
                extension of stock's writer, or each rank saved a checkpoint of its own.
            CorruptCheckpointError: it is damaged, or no save was completed.
            OSError: it cannot be read.
        """
        self.metadata: dict[str, str] = {}
        self.container = "dcp"
        self._files = StoredFiles(path, replace(current(), small_file=_READ_AT_ONCE))
        self._files.has_items = True
        self._opened: dict[str, OccasionalReader] = {}
        self._reserved: AddressReservation | None = None
        self._memory: dict[int, Memory] = {}  # of the tensors, by the address of their storages
        try:
            self.value = self._state(FolderContainer(path).of_all_ranks())
        except BaseException as error:
            finish_after(error, self.close)
            raise

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return the source of bytes of a storage, None if it has them itself."""
        return self._memory.get(storage.data_ptr())  # all of it: a tensor has one of its own

    def check_unchanged(self) -> None:
        """Raise if a file was written to, which no save does.

        Raises:
            CorruptCheckpointError: one was.
        """
        for file in self._opened.values():
            file.check_unchanged()

    def close(self) -> None:
        """Close the files; the tensors must not be used any more."""
        reserved, self._reserved = self._reserved, None
        files = [file.close for file in self._opened.values()]
        finish(self._files.close, *files, *([reserved.close] if reserved is not None else []))

    def _state(self, found: Metadata) -> Any:
        files = self._files
        for key, stored in found.tensors.items():
            if stored.held != stored.numel:
                text = "its parts do not make it up"
                raise CorruptCheckpointError(text, path=files.path, record=key)
            if (problem := problem_of(stored)) is not None:
                raise ConvertError(f"entry {key!r}: {problem}")
        flat, problems, _ = values_of(found, files)
        for problem in problems.values():
            raise ConvertError(problem)
        dtypes = {key: getattr(torch, stored.dtype) for key, stored in found.tensors.items()}
        nbytes = sum(one.numel * dtypes[key].itemsize for key, one in found.tensors.items())
        parts = {
            key: [self._part(chunk, stored.dtype) for chunk in stored.chunks if chunk.nbytes]
            for key, stored in found.tensors.items()
        }
        self._reserved = AddressReservation(nbytes, len(parts))
        for key, stored in found.tensors.items():
            flat[key] = tensor = self._reserved.tensor(stored.shape, dtypes[key])
            if stored.numel:
                shape = (*stored.shape, tensor.itemsize)
                self._memory[tensor.data_ptr()] = ChunkedMemory(shape, parts[key])
        self._paths = found.paths
        return nested(flat, found.paths)

    def _part(self, chunk: Chunk, dtype: str) -> _StoredPart:
        """Return where a chunk of a tensor is.

        Raises:
            ConvertError: only torch can read it.
            CorruptCheckpointError: it is damaged.
            OSError: its file cannot be read.
        """
        found = self._files.located(chunk)
        if found is None or found.start is None or found.nbytes is None:
            raise ConvertError(
                f"entry {chunk.name!r}: only torch knows how it is saved: load it with dcp.load"
            )
        if found.dtype != dtype:
            raise ConvertError(  # what stock's `enable_plan_caching` makes of a new dtype
                f"entry {chunk.name!r} is of {found.dtype}, but `.metadata` says {dtype}: load it "
                "with dcp.load"
            )
        sizes, item = chunk.elements.sizes, found.nbytes // chunk.elements.numel
        strides = [step * item for step in found.stride]
        view = torch.empty_strided((*sizes, item), (*strides, 1), dtype=torch.uint8, device="meta")
        box = Box((*chunk.elements.offsets, 0), (*sizes, item))
        if chunk.file not in self._opened:
            path = self._files.path_of(chunk.file)
            self._opened[chunk.file] = OccasionalReader(path, self._files.config)
        return _StoredPart(box, view, self._opened[chunk.file], found.offset + found.start)

    def warn_of_text(self) -> None:
        """Warn of keys that may have been integers: no optimizer takes its state without them."""
        text = [
            key
            for key, path in self._paths.items()
            if any(type(part) is str and part.isdecimal() for part in path)
        ]
        if text:
            more = f" and {len(text) - 1} more" if len(text) > 1 else ""
            warnings.warn(
                f"{self._files.path}: numbers among the keys of {text[0]!r}{more} are text, as "
                "torch.distributed.checkpoint saves them: if they were integers, as in an "
                "optimizer's state, make them so again before `load_state_dict`",
                stacklevel=4,
            )


# -- a folder as a target --------------------------------------------------------------------------


class _StreamingWriter(FastStorageWriter):
    """Takes the bytes of tensors from an open source."""

    def __init__(self, path: str, source: ConvertSource) -> None:
        super().__init__(path)
        self._source = source

    def _layout(self, name: str) -> ShardLayout:
        return ShardLayout(name, self._bytes_of)

    def _bytes_of(self, tensor: torch.Tensor) -> TensorBytes | None:
        found = bytes_of(tensor)
        if found is None or not found.nbytes or not isinstance(found.memory, HostMemory):
            return found
        storage = tensor.untyped_storage()
        start = found.memory.address - storage.data_ptr()
        memory = self._source.part_of(storage, start, found.nbytes)
        return found if memory is None else found._replace(memory=memory)


def write_folder(
    source: ConvertSource, name: str, path: str, key: str, config: Config
) -> Converted:
    """Write what is under a key of an open source to a folder.

    What was in the folder stays whole until the new checkpoint is.

    Args:
        name: of the source.

    Raises:
        ConvertError: it is no dictionary, two of its entries get one key, a tensor has no bytes of
            its own, or this torch cannot be written for.
        CorruptCheckpointError: the source is damaged, or changed.
        WriteError: it cannot be written; what was there is intact.
    """
    value = part_of(source.value, key)
    if not isinstance(value, Mapping):
        raise ConvertError(f"a folder holds a dictionary, nothing of type {type(value).__name__}")
    reason = self_check()
    if reason is not None:
        raise ConvertError(f"this torch writes other archives than are known here: {reason}")
    with options(**_as_options(config)):
        writer = _StreamingWriter(path, source)
        planner = DefaultSavePlanner()
        writer.set_up_storage_writer(True, rank=0)
        try:
            planner.set_up_planner(
                cast("dict[str, Any]", value),
                storage_meta=writer.storage_meta(),
                is_coordinator=True,
            )
        except ours(ValueError) as error:  # says which key
            raise ConvertError(
                f"{name}: the keys of a folder are paths joined by dots, and two entries get the "
                f"same one ({error}): {_REMEDY}"
            ) from error
        _refuse_odd(planner.state_dict, name)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        results = writer.write_data(plan, planner).wait()
        source.check_unchanged()
        writer.finish(metadata, [results])
    nbytes = sum(
        os.stat(os.path.join(path, name)).st_size
        for name in {result.storage_data.relative_path for result in results} | {".metadata"}
    )
    dropped = tuple(name for name in source.metadata if name != "format")
    return Converted(source.container, "dcp", nbytes, dropped)


_REMEDY = "leave it out with --key (key=), or convert to one file of torch"


def _refuse_odd(flat: Mapping[str, Any], name: str) -> None:
    """Raise if a tensor cannot be loaded from a folder.

    Raises:
        ConvertError: one cannot.
    """
    for key, tensor in flat.items():
        if isinstance(tensor, torch.Tensor) and (problem := unloadable(tensor)) is not None:
            raise ConvertError(
                f"{name}: entry {key!r} cannot be loaded from a folder: {problem}; {_REMEDY}"
            )


def _as_options(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}
