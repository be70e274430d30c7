"""Reads items of one file of a checkpoint into what a planner wants."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from fastserial.checksums import crc32, crc_mismatch
from fastserial.distributed.dcp.item_structure import ItemParser, ItemTensor, check_archive
from fastserial.distributed.dcp.metadata_file import known_of
from fastserial.distributed.reading.part_reader import PartReader, ReadTarget
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.file_index import FileTensor, Record
from fastserial.distributed.sharding.grid import grid_of
from fastserial.errors import (
    CorruptCheckpointError,
    FastserialError,
    LoadMismatchError,
    UnreadableCheckpointError,
)
from fastserial.formats.source import read_exactly
from fastserial.loading.reader import FastFileReader

__all__ = ["ShardReader", "WantedItem"]


class WantedItem(NamedTuple):
    """An item that is to be read.

    Attributes:
        info: where it is, as `.metadata` has it.
        requests: of this rank for it.
        name: for errors.
        dtype, shape: of the tensor, as `.metadata` has them; None for bytes.
    """

    info: Any
    requests: list[ReadItem]
    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class ShardReader:
    """Reads items of an open file."""

    def __init__(
        self, reader: FastFileReader, planner: LoadPlanner, verify: bool, parser: ItemParser
    ) -> None:
        """Read from `reader` for `planner`.

        Args:
            verify: compare the CRC-32 of each item.
            parser: of the items; it remembers those of other files.
        """
        self.all_verified = verify
        self._reader = reader
        self._planner = planner
        self._verify = verify
        self._parser = parser

    def read(self, items: Sequence[WantedItem]) -> None:
        """Read items, and pass them to the planner.

        Raises:
            CorruptCheckpointError: an item is damaged.
            OSError: the file cannot be read.
        """
        found: list[tuple[WantedItem, ItemTensor]] = []
        for wanted in sorted(items, key=lambda one: int(one.info.offset)):
            if wanted.info.offset + wanted.info.length > self._reader.size:
                raise self._damaged(wanted, "the file ends before it does")
            content = self._content(wanted)
            if content is not None:
                found.append((wanted, content))
                continue
            data = read_exactly(self._reader.fd, wanted.info.offset, wanted.info.length)
            if wanted.dtype is None:
                self._take_bytes(wanted, data)
            else:
                self._deliver(wanted, self._loaded_by_torch(wanted, data))
        with torch.no_grad():
            self._read_tensors(found)
        self._reader.check_unchanged()

    def _read_tensors(self, found: Sequence[tuple[WantedItem, ItemTensor]]) -> None:
        """Read tensors in one pass over the file, large ones directly into their targets."""
        targets: list[ReadTarget] = []
        records: list[Record] = []
        of_records: list[WantedItem] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        for wanted, content in found:
            start = wanted.info.offset + content.start
            stored = FileTensor(0, content.dtype, content.shape, content.strides, start)
            grid = grid_of(stored) if content.nbytes else None
            before = len(targets)
            for request in wanted.requests:
                box = Box(tuple(request.storage_offsets), tuple(request.lengths))
                target = self._target(request, box.sizes)
                filled.append((request, target))
                if grid is not None and box.numel:
                    targets.append(ReadTarget(grid, grid.box_of(box), target))
            if len(targets) == before:
                continue
            if self._verify and content.crc is not None:
                records.append(Record(wanted.name, start, content.nbytes, content.crc))
                of_records.append(wanted)
            else:
                self.all_verified = False
        parts = PartReader(self._reader, records, whole=True)
        parts.read_own(targets)
        whole = {
            piece.record: piece.crc
            for piece in parts.ledger.pieces()
            if piece.length == records[piece.record].nbytes
        }
        for number, wanted in enumerate(of_records):
            self._check(wanted, whole.get(number), records[number].crc)
        for request, target in filled:
            self._planner.commit_tensor(request, target)

    def _take_bytes(self, wanted: WantedItem, data: bytes) -> None:
        self._check_whole(wanted, data)
        try:
            for request in wanted.requests:
                self._planner.load_bytes(request, io.BytesIO(data))
        except Exception as error:
            raise UnreadableCheckpointError(
                f"it cannot be loaded: {error}", path=self._reader.name, record=wanted.name
            ) from error

    def _check_whole(self, wanted: WantedItem, data: bytes) -> None:
        """Compare the checksums of an item of bytes, or one that only torch can load."""
        known = known_of(wanted.info)
        if known is not None:
            self._check(wanted, crc32(data), known.crc)
        elif self._verify:
            self.all_verified &= check_archive(data, self._reader.name, wanted.name)

    def _loaded_by_torch(self, wanted: WantedItem, data: bytes) -> torch.Tensor:
        self._check_whole(wanted, data)
        try:
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # its text says which class to allow
            raise UnreadableCheckpointError(
                f"torch does not load it: {error}", path=self._reader.name, record=wanted.name
            ) from error
        except Exception as error:
            raise self._damaged(wanted, f"torch cannot load it: {error}") from error
        if not isinstance(loaded, torch.Tensor):
            raise self._damaged(wanted, f"it holds {type(loaded).__name__}, not a tensor")
        return loaded

    def _content(self, wanted: WantedItem) -> ItemTensor | None:
        """Return the tensor in an item, None if only torch can load it."""
        length, dtype, shape = wanted.info.length, wanted.dtype, wanted.shape
        if dtype is None:
            return None

        def peek(first: int, count: int) -> bytes:
            offset = wanted.info.offset + first
            return os.pread(self._reader.fd, min(count, length - first), offset)

        try:
            known = known_of(wanted.info)
            return self._parser.tensor_in(peek, length, dtype, shape, known)
        except UnreadableCheckpointError as error:
            error.path, error.record = self._reader.name, wanted.name
            raise
        except FastserialError as error:
            text = error.message if isinstance(error, CorruptCheckpointError) else str(error)
            raise self._damaged(wanted, text) from error

    def _deliver(self, wanted: WantedItem, tensor: torch.Tensor) -> None:
        """Copy a tensor, or parts of it, to the targets."""
        for request in wanted.requests:
            part = tensor
            if tuple(request.lengths) != tuple(tensor.shape):  # a sparse one cannot be cut
                ends = zip(request.storage_offsets, request.lengths, strict=True)
                part = tensor[tuple(slice(first, first + count) for first, count in ends)]
            target = self._target(request, tuple(part.shape))
            with torch.no_grad():
                target.copy_(part)
            self._planner.commit_tensor(request, target)

    def _target(self, request: ReadItem, shape: tuple[int, ...]) -> torch.Tensor:
        target = self._planner.resolve_tensor(request)
        if target.layout is torch.strided:  # `copy_` into a detached sparse one has no effect
            target = target.detach()
        if tuple(target.shape) != shape:
            raise LoadMismatchError(
                f"{request.dest_index.fqn} has the shape {tuple(target.shape)}, but {shape} in the "
                f"checkpoint {self._reader.name}"
            )
        return target

    def _check(self, wanted: WantedItem, crc: int | None, expected: int | None) -> None:
        if not self._verify or expected is None:
            self.all_verified = False
        elif (mismatch := crc_mismatch(crc, expected)) is not None:
            raise self._damaged(wanted, f"damaged: {mismatch}")

    def _damaged(self, wanted: WantedItem, text: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            text, path=self._reader.name, record=wanted.name, offset=wanted.info.offset
        )
