"""The layout of the file on rank 0, and what of it the next save may use."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from fastserial.checksums import crc32
from fastserial.distributed.kept_pickle import KeptPickle, Outline, outline_of
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Trailer
from fastserial.formats.zip.layout import ZipLayout, ZipPlan
from fastserial.saving import torch_writer

__all__ = ["Entry", "KeptFile", "LaidOut", "Nowhere", "Places"]

_log = logging.getLogger("fastserial")
_CRC_AT = 4  # in a data descriptor


class Entry(NamedTuple):
    """A record of the file.

    Attributes:
        data: its bytes, None for a storage.
        source: of a storage, see `LaidOut`; None if it is empty.
    """

    name: str
    nbytes: int
    data: bytes | None
    source: int | None


class Nowhere:
    """Memory of a storage of which only the size is known."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def copy_to(self, address: int, start: int, length: int) -> None:
        raise ValueError("no rank holds this memory as a whole")


class LaidOut:
    """The file as rank 0 lays it out.

    Attributes:
        entries: what is in the file, in its order; first the pickle.
        rest: storages that are in no container the ranks look into. A source of -1 or below is
            one of them, `rest[-1 - source]`.
        archive: the name that torch puts before the records' names.
    """

    def __init__(self, archive: str, entries: list[Entry]) -> None:
        """Lay nothing out yet."""
        self.entries = entries
        self.rest: list[torch.UntypedStorage] = []
        self.archive = archive
        self._last: KeptFile | None = None
        self._places: Places | None = None
        self._pickled: tuple[Outline, dict[int, int]] | None = None

    @functools.cached_property
    def plan(self) -> ZipPlan:
        """The layout. The memory of its storages is nowhere; `records` says what they are."""
        layout = ZipLayout(self.archive, torch_writer.alignment(), torch_writer.checksums_wanted())
        for stored, entries in groupby(self.entries, lambda entry: entry.data is None):
            if stored:
                some = list(entries)
                memories = [Nowhere(entry.nbytes) for entry in some]
                layout.add_memories([entry.name for entry in some], memories)
                continue
            for entry in entries:
                data = entry.data or b""
                layout.add_bytes(entry.name, data, crc32(data))
        return torch_writer.finish(layout)

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where the extents of the layout begin, which another pickle does not change."""
        return [extent.offset for extent in self.plan.extents]

    @property
    def places(self) -> Places:
        """Where the records are."""
        if self._places is None:
            extents = self.plan.extents
            data = (extent for extent in extents if isinstance(extent.source, Data))
            sources = (
                (index, entry.source)
                for index, entry in enumerate(self.entries)
                if entry.source is not None
            )
            records = [
                (*source, extent.offset, extent.length)
                for source, extent in zip(sources, data, strict=True)
            ]
            late = isinstance(extents[-1].source, Trailer)
            nbytes = self.plan.nbytes
            self._places = Places(records, extents[-1].offset if late else nbytes, nbytes)
        return self._places

    def take_pickle(self, text: bytes) -> bool:
        """Put another pickle in, if that moves nothing; return whether it is in."""
        first, extents, crcs = self.entries[0], self.plan.extents, self.plan.crcs
        if first.data is None or text == first.data:
            return text == first.data
        if len(text) != first.nbytes or not isinstance(extents[-1].source, Trailer):
            return False
        self.entries[0] = first._replace(data=text)
        begin = next(  # the pickle is the first record, behind its header
            extent.offset + bytes(extent.source.data).index(first.data)
            for extent in extents
            if isinstance(extent.source, Literal) and first.data in bytes(extent.source.data)
        )
        patches = [(begin, text)]
        if crcs[0]:
            crcs[0] = crc32(text)
            patches.append((begin + len(text) + _CRC_AT, crcs[0].to_bytes(4, "little")))
        for place, patch in patches:
            _patch(extents, place, patch)
        return True

    def is_like(self, last: KeptFile) -> None:
        """Say that everything is in the places of a kept file."""
        self._last, self._places = last, last.places

    def remember(self, outline: Outline, ends: dict[int, int]) -> None:
        """Enter what the next save may make its pickle of; see `KeptPickle`."""
        self._pickled = outline, ends

    def kept(self) -> KeptFile | None:
        """Return what the next save may use."""
        if self._last is not None or self._pickled is None:
            return self._last
        outline, ends = self._pickled
        self._pickled = None  # it remembers the state's tensors by their `id`
        try:
            pickled = KeptPickle(self.entries[0].data or b"", outline, ends)
        except Exception:  # the file is safe; the next save makes its own pickle
            _log.debug("the pickle of %r cannot be kept", self.archive, exc_info=True)
            return None
        sizes = len(self.archive.encode()), self.entries[0].nbytes
        self._last = KeptFile(pickled, self.places, _options(), sizes, self)
        return self._last


class Places(NamedTuple):
    """Where everything is in the file.

    Attributes:
        records: those with data, in file order: number, source, place in the file, bytes.
        end: where what needs the checksums of all ranks begins, or the file ends.
        nbytes: size of the file.
    """

    records: list[tuple[int, int, int, int]]
    end: int
    nbytes: int


@dataclass(slots=True)
class KeptFile:
    """The layout of the last file.

    Attributes:
        pickled: its pickle.
        places: in it.
        options: of torch that decide what is in a file.
        sizes: bytes of the archive's name and of the pickle with which the places were found.
        last: the layout.
    """

    pickled: KeptPickle
    places: Places
    options: tuple[int, bool]
    sizes: tuple[int, int]
    last: LaidOut

    def now(self, archive: str, state: object, tensors: Mapping[int, int]) -> LaidOut | None:
        """Return the layout of a state that differs in numbers at most, None for any other.

        Args:
            archive: the name that torch puts before the records' names.
            tensors: numbers of the tensors, by their `id`.
        """
        if _options() != self.options:
            return None
        outline = outline_of(state, tensors)
        text = self.pickled.now(outline) if outline is not None else None
        if text is None:
            return None
        last = self.last
        if archive == last.archive and last.take_pickle(text):
            return last
        first = last.entries[0]._replace(nbytes=len(text), data=text)
        last = LaidOut(archive, [first, *last.entries[1:]])
        sizes = len(archive.encode()), len(text)
        if sizes != self.sizes and last.places != self.places:
            return None
        last.is_like(self)
        self.last, self.sizes = last, sizes
        return last


def _patch(extents: list[Extent], place: int, patch: bytes) -> None:
    """Put known bytes at a place of the file."""
    for index, extent in enumerate(extents):
        if extent.offset >= place + len(patch):
            return
        source = extent.source
        first = max(place, extent.offset)
        stop = min(place + len(patch), extent.offset + extent.length)
        if first < stop and isinstance(source, Literal | DescriptorPatch):
            data = bytearray(source.data)
            data[first - extent.offset : stop - extent.offset] = patch[first - place : stop - place]
            extents[index] = extent._replace(source=source._replace(data=bytes(data)))


def _options() -> tuple[int, bool]:
    return torch_writer.alignment(), torch_writer.checksums_wanted()
