"""What a new file has in common with the checkpoint before is cloned instead of written.

On file systems with reflinks (XFS, btrfs) files can share blocks (`FICLONERANGE`). Both stay
ordinary files: a block that is written in one of them is copied first.

A piece of memory is cloned from the earlier file, the base, if that has the same bytes at the same
offset. A state of the same structure is laid out the same way each time; behind a change of its
structure all is written: torch aligns storages to 64 bytes, so that they move by a part of a block,
and only whole blocks of the file system can be shared. So the ends of a storage are written, too.

`trust="compare"` compares all bytes. `trust="version"` takes a storage for unchanged if this
process saved it to the base, and the version counters of the tensors over it are as they were then;
of each piece one block is compared nonetheless, which shows that an optimizer has changed it behind
the counters.

The base is open while this lasts, so that it may be removed or replaced. fastserial never writes
into a file that exists. If another program does, between the comparison and the clone of a piece,
the new file has its bytes, and the CRC-32 of the right ones.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.config.performance import CLONED_PIECE, FILL_CHUNK, PAGE
from fastserial.errors import ConfigError
from fastserial.formats.extents import Data, Extent
from fastserial.interrupts import Background, Descriptors, finish
from fastserial.memory.storages import StorageMemory, StorageOnHost, is_plain
from fastserial.nests import walk
from fastserial.reasons import Reason

if TYPE_CHECKING:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

Trust = Literal["compare", "version"]

_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("=qQQQ")  # `struct file_clone_range`: descriptor, offset, length, new offset
_ON_ONE_DISK = "save to the file system of the base, if that has reflinks (XFS, btrfs)"

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def clone_range(fd: int, base: int, offset: int, nbytes: int) -> None:
    """Make a file share the blocks that another one has at the same offset.

    Args:
        fd: of the file that gets them.
        base: descriptor of the other one.
        offset, nbytes: multiples of the file system's block.

    Raises:
        OSError: the file system cannot do that.
    """
    fcntl.ioctl(fd, _FICLONERANGE, _RANGE.pack(base, offset, nbytes, offset))


class SavedStorage(NamedTuple):
    """A storage that this process saved: which one, bytes, counters, and CRC-32 if known."""

    storage: StorageWeakRef
    nbytes: int
    versions: list[int]
    crc: int | None


# What was saved with `trust="version"`, by device and inode: the file's size and time of
# modification (ns), and its storages by their offsets.
_saved: dict[tuple[int, int], tuple[int, int, dict[int, SavedStorage]]] = {}
_MOST_SAVED = 8
_NOT_COUNTED = -1  # instead of the version of a tensor that has none


class _Part(NamedTuple):
    """An extent, cut into pieces; those with True may be cloned, all of them if `crc` is known."""

    extent: Extent
    crc: int | None
    pieces: list[tuple[Extent, bool]]


class Base:
    """An earlier checkpoint, open for reading.

    Attributes:
        cloned: bytes that the new file has from it.
        reason: why not all that is the same could be cloned, or None.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, trust: Trust = "compare", state: object = None
    ) -> None:
        """Open a file. One that cannot be opened has nothing in common with the new one.

        Args:
            path: of the file; None: there is none yet.
            trust: how it is known what is the same.
            state: with the tensors whose counters are trusted.

        Raises:
            ConfigError: `trust` is none of its values.
        """
        if trust not in ("compare", "version"):
            raise ConfigError(f'trust must be "compare" or "version", not {trust!r}')
        self.cloned = 0
        self.reason: Reason | None = None
        self._versions = _versions(state) if trust == "version" else {}
        self._storages: dict[int, SavedStorage] = {}  # of the base, if this process saved it
        self._given: tuple[Sequence[Extent], int, CrcLedger | None] = [], 0, None  # to `clone`
        self._rest: list[Extent] = []
        self._files = Descriptors()
        self._fd, self._size, self._block = -1, 0, PAGE
        if path is None:
            return
        try:
            self._fd = self._files.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found = os.fstat(self._fd)
            self._size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            self._block = max(PAGE, os.fstatvfs(self._fd).f_bsize)
        except OSError as error:
            what = f"the base cannot be read: {error.strerror}"
            self.reason = Reason(what, "name a checkpoint that exists")
            return
        size, modified, storages = _saved.get((found.st_dev, found.st_ino), (0, 0, {}))
        if (size, modified) == (found.st_size, found.st_mtime_ns):
            self._storages = storages

    def clone(
        self,
        extents: Sequence[Extent],
        at: int,
        fd: int,
        ledger: CrcLedger | None,
        config: Config,
    ) -> None:
        """Clone what is the same; `take_rest` returns the extents that are to be written.

        Args:
            extents: of the new file's layout.
            at: offset in the new file of the layout's first byte (bytes).
            fd: of the new file, where these bytes are not written yet.
            ledger: gets the CRC-32s of what is cloned; None: none are wanted.
            config: the options.

        Raises:
            StorageChangedError: a storage was resized.
        """
        if self._versions:
            self._given = extents, at, ledger
        self._rest, self.cloned = list(extents), 0
        parts = [
            _Part(extent, self._known_crc(extent, at, ledger), list(self._cut(extent, at)))
            for extent in extents
        ]
        turns = [(part, piece) for part in parts for piece, whole in part.pieces if whole]
        if not turns:
            return
        cloned: set[int] = set()  # offsets of pieces
        errors: list[BaseException] = []
        order = iter(turns)

        def work() -> None:
            comparison = _Comparison(self._fd)
            try:
                for part, piece in order:
                    if errors or self.reason is not None:
                        return
                    compared = piece if part.crc is None else piece._replace(length=self._block)
                    crc = comparison.crc_of_same(compared, at)
                    if crc is not None and self._take(fd, at + piece.offset, piece.length):
                        cloned.add(piece.offset)
                        if part.crc is None:
                            _enter(ledger, piece, crc)
            except BaseException as error:
                errors.append(error)

        threads = Background()
        try:
            for _ in range(min(config.threads, len(turns)) - 1):
                threads.start(work)
            work()
        finally:
            turns.clear()  # if this thread was interrupted
            finish(threads.join)
        if errors:
            raise errors.pop()  # or it would keep this frame, and this frame it
        self._rest = [one for part in parts for one in _left(part, cloned, ledger)]
        self.cloned = sum(e.length for e in extents) - sum(e.length for e in self._rest)

    def take_rest(self) -> list[Extent]:
        """Return the extents that are to be written, once."""
        rest, self._rest = self._rest, []
        return rest

    def remember(self, fd: int) -> None:
        """Remember the storages of the new file, which is complete, if counters are trusted."""
        if not self._versions:
            return
        from torch.multiprocessing.reductions import StorageWeakRef  # imports torch

        reference: Any = StorageWeakRef  # untyped
        (extents, at, ledger), self._given = self._given, ([], 0, None)
        storages: dict[int, SavedStorage] = {}
        for extent in extents:
            storage, record = _storage_of(extent)
            versions = self._versions.get(storage._cdata) if storage is not None else None
            if storage is not None and versions and _NOT_COUNTED not in versions:
                crc = None if ledger is None or record is None else ledger.wait(record)
                kept = SavedStorage(reference(storage), extent.length, versions, crc)
                storages[at + extent.offset] = kept
        found = os.fstat(fd)
        _saved[found.st_dev, found.st_ino] = found.st_size, found.st_mtime_ns, storages
        for old in list(_saved)[:-_MOST_SAVED]:
            _saved.pop(old, None)

    def _known_crc(self, extent: Extent, at: int, ledger: CrcLedger | None) -> int | None:
        """Return the CRC-32 of a storage that is in the base as it is now, by its counters."""
        kept = self._storages.get(at + extent.offset)
        storage, record = _storage_of(extent)
        if kept is None or storage is None or kept.nbytes != extent.length:
            return None
        if kept.storage.cdata != storage._cdata:
            return None
        if kept.versions != self._versions.get(storage._cdata):
            return None
        return 0 if ledger is None or record is None else kept.crc

    def _cut(self, extent: Extent, at: int) -> Iterator[tuple[Extent, bool]]:
        """Cut an extent into pieces that may be cloned (True), and what is before and after."""
        offset, length, source, start = extent
        begin, end = at + offset, at + offset + length
        low = -(-begin // self._block) * self._block
        high = min(end, self._size) // self._block * self._block
        if not isinstance(source, Data) or low >= high or self.reason is not None:
            yield extent, False
            return
        for first, stop in pairwise((begin, *range(low, high, CLONED_PIECE), high, end)):
            if first < stop:
                piece = Extent(first - at, stop - first, source, start + first - begin)
                yield piece, low <= first < high

    def _take(self, fd: int, offset: int, nbytes: int) -> bool:
        """Clone a range; False if the file system cannot."""
        try:
            clone_range(fd, self._fd, offset, nbytes)
        except OSError as error:
            what = f"nothing can be cloned from the base: {error.strerror}"
            self.reason = Reason(what, _ON_ONE_DISK)
            return False
        return True


class _Comparison:
    """Compares memory with a file; for one thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ours, self._theirs = bytearray(FILL_CHUNK), bytearray(FILL_CHUNK)
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (self._ours, self._theirs)
        ]

    def crc_of_same(self, piece: Extent, at: int) -> int | None:
        """Return the CRC-32 of a piece's bytes, None if the file has others.

        Raises:
            StorageChangedError: the storage was resized.
        """
        offset, length, source, start = piece
        if not isinstance(source, Data):
            return None
        crc = 0
        for done in range(0, length, FILL_CHUNK):
            size = min(FILL_CHUNK, length - done)
            source.memory.copy_to(self._addresses[0], start + done, size)
            try:
                read = os.preadv(self._fd, [memoryview(self._theirs)[:size]], at + offset + done)
            except OSError:  # the disk fails: what is there is not known to be the same
                return None
            if read != size or _memcmp(*self._addresses, size):
                return None
            crc = crc32(memoryview(self._ours)[:size], crc)
        return crc


def _left(part: _Part, cloned: set[int], ledger: CrcLedger | None) -> list[Extent]:
    """Return what is to be written of an extent, given the offsets of the pieces that are not."""
    left = [piece for piece, _ in part.pieces if piece.offset not in cloned]
    if part.crc is None or left == [part.extent]:
        return left
    if any(whole and piece.offset not in cloned for piece, whole in part.pieces):
        return [part.extent]  # it has changed: its CRC-32 is another
    _enter(ledger, part.extent, part.crc)
    return [
        piece._replace(source=piece.source._replace(record=None))
        for piece in left
        if isinstance(piece.source, Data)
    ]


def _enter(ledger: CrcLedger | None, piece: Extent, crc: int) -> None:
    source = piece.source
    if ledger is not None and isinstance(source, Data) and source.record is not None:
        ledger.add(source.record, piece.start, piece.length, crc)


def _storage_of(extent: Extent) -> tuple[torch.UntypedStorage | None, int | None]:
    """Return the storage that an extent is all of, if it is one, and the index of its CRC-32."""
    source = extent.source
    if isinstance(source, Data):
        if isinstance(source.memory, StorageOnHost):
            return source.memory.storage, source.record
        if isinstance(source.memory, StorageMemory):
            return source.memory.whole.untyped_storage(), source.record
    return None, None


def _versions(state: object) -> dict[int, list[int]]:
    """Return the version counters of the tensors over each storage, by its identity."""
    import torch

    found: dict[int, list[int]] = {}
    for _, value in walk(state, once=True):
        if isinstance(value, torch.Tensor) and is_plain(value):
            versions = found.setdefault(value.untyped_storage()._cdata, [])
            try:
                versions.append(value._version)
            except RuntimeError:  # an inference tensor
                versions.append(_NOT_COUNTED)
    return found
