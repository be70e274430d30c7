"""`distributed.load` of a folder of torch.distributed.checkpoint, whoever saved it.

Rank 0 reads what is in it, all compare that with what they hold, and each reads what it wants. The
messages: what is in the folder; what does not fit; what was read. No rank unpickles `.metadata`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, MutableMapping
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fastserial.checksums import check_crc, crc32
from fastserial.distributed.conversion import FolderFiles, dtype_of, nested
from fastserial.distributed.dcp.folder import METADATA, storage_info
from fastserial.distributed.dcp.planners import FastLoadPlanner
from fastserial.distributed.dcp.storage_reader import (
    REPLACED,
    FastStorageReader,
    check_archive,
)
from fastserial.distributed.onefile.loader import HALFWAY, LoadResult, LoadTask
from fastserial.distributed.plan.matching import Match, TensorMatch, file_leaves
from fastserial.distributed.ranks.group import node_name
from fastserial.distributed.sharding.file_index import FileTensor, is_plain_tuple, without_bytes
from fastserial.errors import CheckpointReplacedError, ConvertError, CorruptCheckpointError
from fastserial.files.sources import stamp
from fastserial.formats.container import FolderContainer
from fastserial.formats.dcp import Item, parse
from fastserial.formats.dcp import Metadata as FolderMetadata
from fastserial.formats.source import read_regular
from fastserial.formats.tensors import contiguous_stride
from fastserial.interrupts import cleanup, ours
from fastserial.memory.held_settings import paused_collection
from fastserial.nests import is_container
from fastserial.reports import LoadReport, RankReport

_SPACE = 1 << 48  # more bytes than a storage has


class _FolderContents(NamedTuple):
    """What a folder holds.

    Attributes:
        version: CRC-32 of `.metadata`: all ranks need the same checkpoint.
        value: the nest, with a `FileTensor` for each tensor.
        keys: of the tensors that are entries, by their numbers.
        storages: bytes of the tensors that are in values; see `_ValueStorages`.
        metadata: where the entries are.
        damage: of values; then there is nothing else.
        verified: all values were compared with checksums.
    """

    version: int
    value: Any
    keys: dict[int, str]
    storages: list[torch.Tensor]
    metadata: Metadata
    damage: str
    verified: bool


class _RankRead(NamedTuple):
    """What a rank did."""

    line: RankReport
    damage: str
    verified: bool


class FolderLoadTask(LoadTask):
    """One load of a folder on one rank."""

    def compare(self, into: Any, cast: bool, beside: object = None) -> str:
        """See `LoadTask.compare`."""
        traffic, verify = self._traffic, self._config.verify_on_load
        with paused_collection():
            found: _FolderContents = traffic.decide(
                None, lambda _: _contents_of(self.path, verify, traffic.alive)
            )
            self._found = found
            if found.damage:
                return ""
            self._reader = _FolderReader(self.path, verify, traffic.alive)
            self._reader.take(found.version)
            _number_keys(found.value, into)
            leaves = file_leaves(found.value)
            self._match = match = Match(traffic.rank, traffic.ranks, cast, strict=self._strict)
            match.compare(into, found.value, beside)
            refusal = self._compare_ranks(leaves, [])
        self._planned = perf_counter()
        return refusal

    def fill(self) -> LoadResult:
        """See `LoadTask.fill`."""
        if self._found.damage:
            return LoadResult(self._found.damage, False, ())
        return super().fill()

    def _move(self) -> None:
        found = self._found
        self._damage = ""
        try:
            entries = [job for job in self._match.jobs if job.tensor.number in found.keys]
            self._reader.fill(entries, found.keys, found.metadata)
        except ours(CorruptCheckpointError) as error:
            self._damage = f"{error} (read by rank {self._traffic.job_rank}). {HALFWAY}"
        with torch.no_grad():
            for tensor, held in self._match.jobs:
                if tensor.number in found.keys or not tensor.offset:
                    continue
                whole = _tensor_in_value(tensor, found.storages)
                for box, view in held.parts:
                    spans = zip(box.offsets, box.sizes, strict=True)
                    view.copy_(whole[tuple(slice(at, at + size) for at, size in spans)])

    def _judge(self) -> LoadResult:
        reader = self._reader
        line = RankReport(
            rank=self._traffic.job_rank,
            node=node_name(),
            bytes=reader.nbytes,
            sent_bytes=0,
            received_bytes=0,
            phases={
                "plan": self._planned - self._began,
                "own": perf_counter() - self._planned,
                "share": 0.0,
            },
        )
        mine = _RankRead(line, self._damage, reader.is_verified and self._found.verified)

        def decide(every: list[_RankRead]) -> LoadResult:
            damage = next((one.damage for one in every if one.damage), "")
            verified = not damage and all(one.verified for one in every)
            return LoadResult(damage, verified, tuple(one.line for one in every))

        result: LoadResult = self._traffic.decide(mine, decide)
        return result

    def report(self, result: LoadResult) -> LoadReport:
        """See `LoadTask.report`."""
        return LoadReport(
            path=self.path,
            container="dcp",
            bytes=sum(line.bytes for line in result.ranks),
            seconds=perf_counter() - self._began,
            engine=self._reader.engine,
            verified=result.verified,
            ranks=result.ranks,
            missing_keys=tuple(self._match.missing),
            unexpected_keys=self._unexpected,
        )


# -- what is in a folder ---------------------------------------------------------------------------


def _contents_of(path: str, verify: bool, between: Callable[[], None]) -> _FolderContents:
    """Read what is in a folder, without the bytes of tensors. Executes no pickle.

    Args:
        verify: compare the values with their checksums.
        between: called again and again.

    Raises:
        CorruptCheckpointError: `.metadata` is damaged, or there is none.
        ConvertError: its entries cannot be in one nest.
        UnreadableCheckpointError: `.metadata` is no regular file.
        CheckpointReplacedError: another save completed meanwhile.
        OSError: a file cannot be read.
    """
    name = os.path.join(path, METADATA)
    try:
        data = read_regular(name)
    except ours(FileNotFoundError):
        FolderContainer(path).of_all_ranks()  # may know why
        raise
    version, found = crc32(data), parse(data, name)
    if found.missing:
        text = "`.metadata` does not say where it is"
        raise CorruptCheckpointError(text, path=path, record=found.missing[0])
    metadata = Metadata({}, storage_data={})
    try:
        flat, verified = _values_of(path, found, verify, between)
    except ours(CorruptCheckpointError) as error:
        return _FolderContents(version, None, {}, [], metadata, str(error), False)
    except ours(FileNotFoundError) as error:
        with open(name, "rb") as file:
            if crc32(file.read()) == version:
                raise
        raise CheckpointReplacedError(errno.ENOENT, REPLACED, path) from error
    storages = _ValueStorages()
    flat = without_bytes(flat, storages)
    used = [one.number for _, one in file_leaves(flat) if isinstance(one, FileTensor)]
    first = 1 + max(used, default=-1)
    keys: dict[int, str] = {}
    extended = {item.key for item in found.items if item.is_extended}
    for number, (key, stored) in enumerate(found.tensors.items(), first):
        dtype, problem = torch.uint8, None
        try:
            dtype = dtype_of(key, stored)
        except ours(ConvertError) as error:
            problem = str(error)
        if key in extended:
            problem = "it went through an extension: load it with dcp.load"
        elif stored.dtype.startswith(("quint", "qint")):
            problem = "in the folder it is quantized"
        shape = stored.shape
        strides = contiguous_stride(shape)
        flat[key] = FileTensor(number, dtype, shape, strides, 0, (), problem, number)
        keys[number] = key
        if sum(prod(chunk.sizes) for chunk in stored.chunks) != prod(shape):
            text = "its parts do not make it up"
            raise CorruptCheckpointError(text, path=path, record=key)
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in stored.chunks
        ]
        entry = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
        metadata.state_dict_metadata[key] = entry
    for item in found.items:
        if os.path.basename(item.file) != item.file:
            text = f"its file {item.file!r} is not in the folder"
            raise CorruptCheckpointError(text, path=path, record=item.name)
        if item.chunk is not None:
            info = storage_info(item.file, item.offset, item.length, item.known)
            metadata.storage_data[MetadataIndex(item.key, torch.Size(item.chunk.offsets))] = info
    value = nested(flat, found.paths)
    return _FolderContents(version, value, keys, storages.found, metadata, "", verified)


def _values_of(
    path: str, found: FolderMetadata, verify: bool, between: Callable[[], None]
) -> tuple[dict[str, Any], bool]:
    """Return the values by their keys, and whether all were compared with checksums.

    In place of one that cannot be loaded is a `FileTensor` that says why.
    """
    files, verified = FolderFiles(path), verify
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    with cleanup(files.close):
        items = {item.key: item for item in found.items if item.chunk is None}
        for key in found.values:
            between()
            data = files.data_of(items[key])
            if verify:
                verified &= _is_sound(items[key], data, path)
            try:
                values[key] = files.value_of(items[key], data)
            except ours(ConvertError) as error:
                problems[key] = str(error)
        files.check_unchanged()
    return values | {key: _unloaded(text) for key, text in problems.items()}, verified


def _unloaded(problem: str) -> FileTensor:
    return FileTensor(-1, torch.uint8, (), (), 0, (), problem, -1)


def _is_sound(item: Item, data: bytes, path: str) -> bool:
    """Compare a value with its checksum; return whether it has one.

    Raises:
        CorruptCheckpointError: it differs.
    """
    if item.known is None:
        try:
            return check_archive(data)
        except ours(CorruptCheckpointError) as error:
            raise CorruptCheckpointError(error.message, path=path, record=item.name) from error
    if item.known.crc is None:
        return False
    check_crc(crc32(data), item.known.crc, path, item.name)
    return True


class _ValueStorages:
    """The storages of tensors that are in values: number n is at (n + 1) * `_SPACE`."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def offset_of(self, storage: torch.UntypedStorage) -> int:
        """Return the place of a storage."""
        address = storage.data_ptr()
        if address not in self._places:
            self.found.append(torch.empty(0, dtype=torch.uint8).set_(storage))
            self._places[address] = len(self.found) * _SPACE
        return self._places[address]


def _tensor_in_value(tensor: FileTensor, storages: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor that has elements."""
    number, start = divmod(tensor.offset, _SPACE)
    storage = storages[number - 1].untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(storage, start // tensor.itemsize, tensor.shape, tensor.stride)
    made = made.conj() if "conj" in tensor.pending else made
    return made.neg() if "neg" in tensor.pending else made


def _number_keys(there: Any, into: Any) -> None:
    """Turn keys that are no text in `into`, or in an optimizer's state, into what they were.

    In folders they are text.
    """
    seen: set[int] = set()

    def visit(there: Any, into: Any, is_state: bool) -> None:
        if id(there) in seen or not is_container(there):
            return
        seen.add(id(there))
        if isinstance(there, MutableMapping):
            wanted: Any = into if isinstance(into, Mapping) and is_container(into) else {}
            numbers: dict[str, Any] = {}
            if any(type(key) is int for key in wanted) or (is_state and not wanted):
                numbers = {key: int(key) for key in there if _is_number(key) and key not in wanted}
            others = [key for key in wanted if not isinstance(key, str) and key not in there]
            numbers |= {str(key): key for key in others}
            if not numbers.keys().isdisjoint(there):
                held = list(there.items())
                there.clear()
                for key, item in held:
                    there[numbers.get(key, key)] = item
            is_optimizer = {"state", "param_groups"} <= there.keys()
            for key, item in there.items():
                visit(item, wanted.get(key), is_optimizer and key == "state")
        elif isinstance(there, list) or is_plain_tuple(there):
            items = into if isinstance(into, list | tuple) else ()
            for at, item in enumerate(there):
                visit(item, items[at] if at < len(items) else None, False)

    visit(there, into, False)


def _is_number(key: Any) -> bool:
    return type(key) is str and key.isascii() and key.isdecimal() and str(int(key)) == key


# -- its bytes -------------------------------------------------------------------------------------


class _FolderReader(FastStorageReader):
    """Reads what a rank wants.

    Attributes:
        nbytes: that were read.
        engine: that read them.
        is_verified: whether all of them were compared with checksums.
    """

    def __init__(self, path: str, verify: bool, between: Callable[[], None]) -> None:
        super().__init__(path, verify=verify)
        self.between = between
        self.nbytes, self.engine, self.is_verified = 0, "buffered", verify

    def take(self, version: int) -> None:
        """Note which `.metadata` is there.

        Raises:
            CheckpointReplacedError: it is not the one of this version.
            OSError: it cannot be read.
        """
        path = os.path.join(self.path, METADATA)
        with open(path, "rb") as file:
            self._seen = path, stamp(file.fileno())
            if crc32(file.read()) != version:
                raise CheckpointReplacedError(errno.ENOENT, REPLACED, str(self.path))

    def fill(self, jobs: list[TensorMatch], keys: dict[int, str], metadata: Metadata) -> None:
        """Read the tensors that a rank wants, given the key of each by its number.

        Raises:
            CorruptCheckpointError: one is damaged, or lacks a part.
        """
        self.set_up_storage_reader(metadata, False)
        planner = FastLoadPlanner()
        items: list[ReadItem] = []
        for tensor, held in jobs:
            key = keys[tensor.number]
            for box, view in held.parts:
                entry: Any = metadata.state_dict_metadata[key]
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                found = create_read_items_for_chunk_list(key, entry, [chunk])
                if sum(prod(one.lengths) for one in found) != box.numel:
                    text = "its parts do not make it up"
                    raise CorruptCheckpointError(text, path=str(self.path), record=key)
                planner.views[MetadataIndex(key, chunk.offsets)] = view
                items += found
        self.read_data(LoadPlan(items), planner).wait()

    def report(self, **found: Any) -> None:
        counts = found.pop("counts")
        self.nbytes += counts.direct + counts.cached
        self.engine = found["engine"]
        self.is_verified = self.is_verified and found["verified"]
