"""Reads items of one file of a checkpoint into what a planner wants.

Large tensors that are wanted whole go straight to their places; small items, which lie between
them, are read in the same pass and taken apart in memory. What is wanted in part is read in chunks.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from fastserial.checkpoints.tensor_read import direct_extent
from fastserial.checksums import CrcLedger, crc32, crc_mismatch
from fastserial.config.performance import SCATTERED_CHUNK
from fastserial.distributed.dcp.item_structure import Content, Structures, check_archive
from fastserial.distributed.dcp.places import known_of
from fastserial.distributed.dcp.tensor_bytes import outermost_first
from fastserial.distributed.sharding.boxes import Box, boxes_of_range, intersect
from fastserial.errors import (
    CorruptCheckpointError,
    FastserialError,
    LoadMismatchError,
    UnreadableCheckpointError,
)
from fastserial.formats.storages import contiguous_stride
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import CheckedSink, HostSink, ReadExtent
from fastserial.memory.buffers import host_buffer
from fastserial.memory.storages import bytes_at, is_plain

__all__ = ["ShardReader", "Wanted"]

_SMALL = 1024 * 1024  # bytes of an item that is read with others
_ALIGN = 64  # bytes: archives of torch align data so, from their beginning on


class Wanted(NamedTuple):
    """An item, and who wants it.

    Attributes:
        place: what `.metadata` says of where it is.
        requests: of this rank.
        name: for errors.
        dtype, shape: what `.metadata` says of the tensor; None for bytes.
    """

    place: Any
    requests: list[ReadItem]
    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class _Straight(NamedTuple):
    """A tensor whose bytes are read to where they belong."""

    wanted: Wanted
    target: torch.Tensor
    extent: ReadExtent
    crc: int | None


class ShardReader:
    """Reads items of an open file."""

    def __init__(
        self, reader: FastFileReader, planner: LoadPlanner, verify: bool, structures: Structures
    ) -> None:
        """Read from `reader` for `planner`.

        Args:
            verify: compare the CRC-32 of each item.
            structures: what was seen in other files.
        """
        self.all_verified = verify
        self._reader = reader
        self._planner = planner
        self._verify = verify
        self._structures = structures

    def read(self, items: Sequence[Wanted]) -> None:
        """Read items, and hand them to the planner.

        Raises:
            CorruptCheckpointError: an item is damaged.
            OSError: the file cannot be read.
        """
        ordered = sorted(items, key=lambda wanted: int(wanted.place.offset))
        for wanted in ordered:
            if wanted.place.offset + wanted.place.length > self._reader.size:
                raise self._damaged(wanted, "the file ends before it does")
        *groups, last = _groups([found for found in ordered if found.place.length <= _SMALL])
        for group in groups:
            self._read_together(group, [])
        straight: list[_Straight] = []
        for wanted in ordered:
            if wanted.place.length > _SMALL:
                self._take_large(wanted, straight)
        self._read_together(last, straight)  # they lie between each other in the file

    def _read_together(self, small: Sequence[Wanted], straight: Sequence[_Straight]) -> None:
        """Read small items and large tensors in one pass over the file."""
        scratch, places = _room_for(small)
        address = scratch.data_ptr()
        extents = [
            ReadExtent(
                wanted.place.offset,
                wanted.place.length,
                HostSink(address + place, wanted.place.length, scratch),
            )
            for wanted, place in zip(small, places, strict=True)
        ]
        ledger = CrcLedger([one.extent.length for one in straight], [None] * len(straight))
        for record, (_, _, extent, crc) in enumerate(straight):
            checked = self._verify and crc is not None
            sink = CheckedSink(extent.sink, ledger, record) if checked else extent.sink
            extents.append(ReadExtent(extent.offset, extent.length, sink))
        if not extents:
            return
        self._reader.attend([one.target.untyped_storage() for one in straight])
        self._reader.read_into(extents)
        for wanted, place in zip(small, places, strict=True):
            self._take_in_memory(wanted, scratch[place : place + wanted.place.length])
        for record, one in enumerate(straight):
            known = self._verify and one.crc is not None
            self._check(one.wanted, ledger.wait(record) if known else None, one.crc)
            self._commit(one.wanted.requests[0], one.target)

    # -- small items ---------------------------------------------------------------------------

    def _take_in_memory(self, wanted: Wanted, item: torch.Tensor) -> None:
        """Hand over an item that was read as a whole."""
        address, length = item.data_ptr(), item.numel()
        if wanted.dtype is None:
            self._take_bytes(wanted, bytes_at(address, length))
            return

        def peek(first: int, count: int) -> bytes:
            return bytes(bytes_at(address + first, min(count, length - first)))

        content = self._content(wanted, peek)
        if content is None:
            self._deliver(wanted, self._loaded_by_torch(wanted, bytes_at(address, length)))
            return
        part = item[content.start : content.start + content.nbytes]
        if content.nbytes:
            self._check(wanted, crc32(_view(part)) if self._verify else None, content.crc)
        if part.storage_offset() % content.dtype.itemsize:
            part = part.clone()
        elements = part.view(content.dtype)
        self._deliver(wanted, elements.as_strided(content.shape, content.strides))

    def _take_bytes(self, wanted: Wanted, data: bytes) -> None:
        self._check_whole(wanted, data)
        try:
            for request in wanted.requests:
                self._planner.load_bytes(request, io.BytesIO(data))
        except Exception as error:
            raise UnreadableCheckpointError(
                f"it cannot be loaded: {error}", path=self._reader.name, record=wanted.name
            ) from error

    def _check_whole(self, wanted: Wanted, data: bytes) -> None:
        """Compare the checksums of an item that is bytes, or that only torch knows how to load."""
        known = known_of(wanted.place)
        if known is not None:
            self._check(wanted, crc32(data) if self._verify else None, known.crc)
        elif self._verify:
            self.all_verified &= check_archive(data, self._reader.name, wanted.name)

    def _loaded_by_torch(self, wanted: Wanted, data: bytes) -> torch.Tensor:
        self._check_whole(wanted, data)
        try:
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # stock raises it; it says what to allow
            raise UnreadableCheckpointError(
                f"torch does not load it: {error}", path=self._reader.name, record=wanted.name
            ) from error
        except Exception as error:
            raise self._damaged(wanted, f"torch cannot load it: {error}") from error
        if not isinstance(loaded, torch.Tensor):
            raise self._damaged(wanted, f"it holds no tensor, but {type(loaded).__name__}")
        return loaded

    # -- large items ---------------------------------------------------------------------------

    def _take_large(self, wanted: Wanted, straight: list[_Straight]) -> None:
        """Read an item by itself, or add it to those that are read together."""
        offset, length = wanted.place.offset, wanted.place.length

        def peek(first: int, count: int) -> bytes:
            return os.pread(self._reader.fd, min(count, length - first), offset + first)

        content = self._content(wanted, peek) if wanted.dtype is not None else None
        if content is None:
            whole = torch.empty(length, dtype=torch.uint8, device="cpu")
            sink = HostSink(whole.data_ptr(), length, whole)
            self._reader.read_into([ReadExtent(offset, length, sink)])
            data = bytes_at(whole.data_ptr(), length)
            if wanted.dtype is None:
                self._take_bytes(wanted, data)
            else:
                self._deliver(wanted, self._loaded_by_torch(wanted, data))
            return
        request = wanted.requests[0]
        if len(wanted.requests) == 1 and tuple(request.lengths) == content.shape:
            target = self._target(request, content.shape)
            if target.dtype == content.dtype and is_plain(target):
                view = torch.empty_strided(
                    content.shape, content.strides, dtype=content.dtype, device="meta"
                )
                self._reader.attend([target.untyped_storage()])
                extent = direct_extent(offset + content.start, view, target, self._reader.ring)
                if extent is not None:
                    straight.append(_Straight(wanted, target, extent, content.crc))
                    return
        self._read_in_chunks(wanted, content)

    def _read_in_chunks(self, wanted: Wanted, content: Content) -> None:
        """Read a tensor a chunk at a time, and copy from each what is wanted."""
        order = outermost_first(content.strides)
        shape = tuple(content.shape[dim] for dim in order)
        jobs = []
        for request in wanted.requests:
            target = self._target(request, tuple(request.lengths))
            box = Box(
                tuple(int(request.storage_offsets[dim]) for dim in order),
                tuple(int(request.lengths[dim]) for dim in order),
            )
            jobs.append((request, target, target.permute(order), box))
        item = content.dtype.itemsize
        count, step = content.nbytes // item, SCATTERED_CHUNK // item
        scratch = torch.empty(min(count, step), dtype=content.dtype, device="cpu")
        base = wanted.place.offset + content.start
        verify = self._verify and content.crc is not None
        crc = 0
        for first in range(0, count, step):
            stop = min(first + step, count)
            pieces = list(_pieces(shape, first, stop, jobs))
            if not pieces and not verify:
                continue
            nbytes = (stop - first) * item
            sink = HostSink(scratch.data_ptr(), nbytes, scratch)
            self._reader.read_into([ReadExtent(base + first * item, nbytes, sink)])
            if verify:
                crc = crc32(_view(scratch[: stop - first].view(torch.uint8)), crc)
            for at, row, part, target, box in pieces:
                whole = scratch[at : at + row.numel].view(row.sizes)
                target[part.slices(box)].copy_(whole[part.slices(row)])
        self._check(wanted, crc if verify else None, content.crc)
        for request, target, _, _ in jobs:
            self._commit(request, target)

    # -- what all have in common ---------------------------------------------------------------

    def _content(self, wanted: Wanted, peek: Any) -> Content | None:
        """Return the tensor in an item, None if only torch knows how to load it."""
        length, dtype, shape = wanted.place.length, wanted.dtype, wanted.shape
        if dtype is None:
            return None
        known = known_of(wanted.place)
        if known is not None and known.start is not None:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if known.start + nbytes > length:
                raise self._damaged(wanted, "it has not as many bytes as its shape says")
            strides = known.strides or contiguous_stride(shape)
            return Content(known.start, nbytes, dtype, shape, strides, known.crc)
        try:
            return self._structures.content(peek, length, dtype, shape)
        except UnreadableCheckpointError as error:
            error.path, error.record = self._reader.name, wanted.name
            raise
        except FastserialError as error:
            text = error.message if isinstance(error, CorruptCheckpointError) else str(error)
            raise self._damaged(wanted, text) from error

    def _deliver(self, wanted: Wanted, tensor: torch.Tensor) -> None:
        """Copy a tensor, or parts of it, to where they are wanted."""
        for request in wanted.requests:
            part = tensor
            if tuple(request.lengths) != tuple(tensor.shape):  # a sparse one cannot be cut
                ends = zip(request.storage_offsets, request.lengths, strict=True)
                part = tensor[tuple(slice(first, first + count) for first, count in ends)]
            target = self._target(request, tuple(part.shape))
            with torch.no_grad():
                target.copy_(part)
            self._commit(request, target)

    def _target(self, request: ReadItem, shape: tuple[int, ...]) -> torch.Tensor:
        target = self._planner.resolve_tensor(request)
        if target.layout is torch.strided:  # a sparse one would stay as it is
            target = target.detach()
        if tuple(target.shape) != shape:
            raise LoadMismatchError(
                f"{request.dest_index.fqn} wants shape {tuple(target.shape)}, but the checkpoint "
                f"{self._reader.name} has {shape}"
            )
        return target

    def _commit(self, request: ReadItem, target: torch.Tensor) -> None:
        self._planner.commit_tensor(request, target)

    def _check(self, wanted: Wanted, crc: int | None, expected: int | None) -> None:
        if crc is None or expected is None:
            self.all_verified = False
        elif (mismatch := crc_mismatch(crc, expected)) is not None:
            raise self._damaged(wanted, f"damaged: {mismatch}")

    def _damaged(self, wanted: Wanted, text: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            text, path=self._reader.name, record=wanted.name, offset=wanted.place.offset
        )


def _view(data: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous uint8 tensor."""
    return host_buffer(data.data_ptr(), data.numel()).view


def _groups(items: Sequence[Wanted]) -> list[list[Wanted]]:
    """Return items in groups that fit a scratch buffer; the last may be empty."""
    groups: list[list[Wanted]] = [[]]
    nbytes = 0
    for wanted in items:
        if groups[-1] and nbytes + wanted.place.length > SCATTERED_CHUNK:
            groups.append([])
            nbytes = 0
        groups[-1].append(wanted)
        nbytes += wanted.place.length
    return groups


def _room_for(items: Sequence[Wanted]) -> tuple[torch.Tensor, list[int]]:
    """Return memory for items, and where in it each has its place."""
    places: list[int] = []
    at = 0
    for wanted in items:
        places.append(at)
        at += wanted.place.length + -wanted.place.length % _ALIGN
    return torch.empty(at, dtype=torch.uint8, device="cpu"), places


def _pieces(
    shape: tuple[int, ...], first: int, stop: int, jobs: Sequence[Any]
) -> Iterator[tuple[int, Box, Box, torch.Tensor, Box]]:
    """Yield what is wanted of the elements [first, stop).

    That is: where the consecutive box `row` begins in the chunk, the row, the part of it that is
    wanted, the target that wants it, and the box that is this target.
    """
    at = 0
    for row in boxes_of_range(shape, first, stop):
        for _, _, target, box in jobs:
            part = intersect(row, box)
            if part is not None:
                yield at, row, part, target, box
        at += row.numel
