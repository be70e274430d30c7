"""What a new file has in common with the checkpoint before is cloned instead of written.

On file systems with reflinks (XFS, btrfs) files can share blocks (`FICLONERANGE`). Both stay
ordinary files: a block that is written in one of them is copied first.

A piece of memory is cloned from the earlier file, the base, if that has the same bytes at the same
offset. A state of the same structure is laid out the same way each time; behind a change of its
structure all is written: torch aligns storages to 64 bytes, so that they move by a part of a block,
and only whole blocks of the file system can be shared. So the ends of a storage are written, too.

All bytes are compared. Rejected: to take a storage for unchanged if the version counters of its
tensors are as they were. torch's own fused optimizers leave them as they are.

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

from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.config.performance import CLONED_PIECE, FILL_CHUNK, PAGE
from fastserial.files.linux import preadv
from fastserial.formats.extents import Data, Extent
from fastserial.interrupts import Background, Descriptors, cleanup, ours
from fastserial.reasons import Reason

# linux/fs.h; these machines have other bits for the direction of an ioctl
_OTHER_BITS = ("ppc", "mips", "sparc", "alpha")
_FICLONERANGE = 0x8020940D if os.uname().machine.startswith(_OTHER_BITS) else 0x4020940D
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


class Base:
    """An earlier checkpoint, open for reading.

    Attributes:
        cloned: bytes that the new file has from it.
        reason: why not all that is the same could be cloned, or None.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file. One that cannot be opened has nothing in common with the new one."""
        self.cloned = 0
        self.reason: Reason | None = None
        self._rest: list[Extent] = []
        self._files = Descriptors()
        self._threads = Background()
        self._turns: list[Extent] = []  # pieces to compare
        self._fd, self._size, self._block = -1, 0, PAGE
        try:
            self._fd = self._files.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found = os.fstat(self._fd)
            self._size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            self._block = max(PAGE, os.fstatvfs(self._fd).f_bsize)
        except ours(OSError) as error:
            what = f"the base cannot be read: {error.strerror}"
            self.reason = Reason(what, "name a checkpoint that exists")

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
        self._rest, self.cloned = list(extents), 0
        pieces = [piece for extent in extents for piece in self._cut(extent, at)]
        turns = [piece for piece, whole in pieces if whole]
        if not turns:
            return
        cloned: set[int] = set()  # offsets of pieces
        errors: list[BaseException] = []
        self._turns, order = turns, iter(turns)

        def work() -> None:
            comparison = _Comparison(self._fd)
            try:
                for piece in order:
                    if errors or self.reason is not None:
                        return
                    crc = comparison.crc_of_same(piece, at)
                    if crc is not None and self._take(fd, at + piece.offset, piece.length):
                        cloned.add(piece.offset)
                        _enter(ledger, piece, crc)
            except BaseException as error:
                errors.append(error)

        with cleanup(self.stop):
            for _ in range(min(config.threads, len(turns)) - 1):
                self._threads.start(work)
            work()
        if errors:
            raise errors.pop()  # or it would keep this frame, and this frame it
        self._rest = [piece for piece, _ in pieces if piece.offset not in cloned]
        self.cloned = sum(e.length for e in extents) - sum(e.length for e in self._rest)

    def take_rest(self) -> list[Extent]:
        """Return the extents that are to be written, once."""
        rest, self._rest = self._rest, []
        return rest

    def stop(self) -> None:
        """Let no thread clone any more: the new file may be closed then. Idempotent."""
        self._turns.clear()  # if the caller was interrupted
        self._threads.join()

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
        except ours(OSError) as error:
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
                read = preadv(self._fd, [memoryview(self._theirs)[:size]], at + offset + done)
            except ours(OSError):  # the disk fails: what is there is not known to be the same
                return None
            if read != size or _memcmp(*self._addresses, size):
                return None
            crc = crc32(memoryview(self._ours)[:size], crc)
        return crc


def _enter(ledger: CrcLedger | None, piece: Extent, crc: int) -> None:
    source = piece.source
    if ledger is not None and isinstance(source, Data) and source.record is not None:
        ledger.add(source.record, piece.start, piece.length, crc)
