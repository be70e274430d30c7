"""Every state that a disk may have when the power is cut, by the writes and flushes that it got.

What was written before a flush is there. Of what came later a part may be, down to single sectors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<cQI")
_BLOCK = 4096
_SECTOR = 512
_MOST_CUTS = 16  # of a write, at whole pages
_MOST_PAIRS = 400  # of one window
_LOOP_SET_FD, _LOOP_SET_STATUS64, _LOOP_CTL_GET_FREE = 0x4C00, 0x4C04, 0x4C82
_LOOP_INFO64, _FLAGS_AT, _AUTOCLEAR = 232, 52, 4  # size (bytes), where its flags are
_MS_RDONLY = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Write(NamedTuple):
    offset: int
    data: bytes


class Flush(NamedTuple):
    pass


class Mark(NamedTuple):
    text: str


Event = Write | Flush | Mark


def read_log(path: Path) -> list[Event]:
    """Return what a disk was told: the log of `mirror.py --recording`."""
    data, at = path.read_bytes(), 0
    events: list[Event] = []
    while at < len(data):
        kind, offset, nbytes = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        body = data[at : at + nbytes]
        at += nbytes
        if kind == b"M":
            events.append(Mark(body.decode()))
        else:
            events.append(Write(offset, body) if kind == b"W" else Flush())
    return events


class Image:
    """The bytes of a disk: blocks that differ from zero."""

    def __init__(self, blocks: dict[int, bytes] | None = None) -> None:
        self.blocks = dict(blocks or {})

    def write(self, write: Write) -> None:
        offset, data = write
        while data:
            number, at = divmod(offset, _BLOCK)
            part = data[: _BLOCK - at]
            if len(part) < _BLOCK:
                old = self.blocks.get(number, bytes(_BLOCK))
                whole = old[:at] + part + old[at + len(part) :]
            else:
                whole = part
            self.blocks[number] = whole
            offset, data = offset + len(part), data[len(part) :]

    def store(self, path: Path, nbytes: int) -> None:
        """Write a file of so many bytes, with holes."""
        with path.open("wb", buffering=0) as file:
            file.truncate(nbytes)
            run: list[bytes] = []
            first = 0
            for number in sorted(self.blocks):
                block = self.blocks[number]
                if run and number != first + len(run):
                    os.pwrite(file.fileno(), b"".join(run), first * _BLOCK)
                    run = []
                if not any(block):
                    continue
                if not run:
                    first = number
                if number != first + len(run):
                    os.pwrite(file.fileno(), b"".join(run), first * _BLOCK)
                    run, first = [], number
                run.append(block)
            if run:
                os.pwrite(file.fileno(), b"".join(run), first * _BLOCK)


@dataclass
class DiskState:
    """What may be on the disk.

    Attributes:
        image: all of it.
        key: equal for equal ones, within one list of events.
        after: the event that the cut came after.
        lost: what of the events before is not there.
    """

    image: Image
    key: bytes
    after: int
    lost: tuple[str, ...]


def disk_states(start: Image, events: list[Event], full: bool) -> Iterator[DiskState]:
    """Yield what may be on a disk after each event.

    After each write: everything, and the write torn at sectors. Before each flush and at each mark:
    all but one of the writes since the flush before.

    Args:
        full: all but one also after each write; at flushes and marks also all but two, and each
            write torn.
    """
    certain = Image(start.blocks)
    touched: set[int] = set()
    window: list[tuple[int, Write]] = []
    digests: dict[bytes, bytes] = {}

    def state(writes: list[Write], after: int, lost: tuple[str, ...]) -> DiskState:
        image = Image(certain.blocks)
        here = set(touched)
        for write in writes:
            image.write(write)
        for _, write in window:
            here.update(_blocks_of(write))
        whole = hashlib.blake2b(digest_size=16)
        for number in sorted(here):
            block = image.blocks.get(number, bytes(_BLOCK))
            if block not in digests:
                digests[block] = hashlib.blake2b(block, digest_size=16).digest()
            whole.update(number.to_bytes(8, "little") + digests[block])
        return DiskState(image, whole.digest(), after, lost)

    def drops(after: int, most: int) -> Iterator[DiskState]:
        for count in range(1, most + 1):
            chosen = itertools.combinations(range(len(window)), count)
            for gone in itertools.islice(chosen, _MOST_PAIRS):
                kept = [write for place, (_, write) in enumerate(window) if place not in gone]
                yield state(kept, after, tuple(_said(*window[place]) for place in gone))

    yield state([], -1, ())
    for index, event in enumerate(events):
        if isinstance(event, Write):
            before = [write for _, write in window]
            window.append((index, event))
            if full:
                for part in _parts(event):
                    yield state([*before, part], index, (f"a part of {_said(index, event)}",))
            yield state([*before, event], index, ())
            if full:
                yield from drops(index, 1)
            continue
        yield state([write for _, write in window], index, ())
        yield from drops(index, 2 if full else 1)
        if full:
            for place, (number, write) in enumerate(window):
                others = [one for other, (_, one) in enumerate(window) if other != place]
                for part in _parts(write):
                    text = f"a part of {_said(number, write)}"
                    yield state([*others[:place], part, *others[place:]], index, (text,))
        if isinstance(event, Flush):
            for _, write in window:
                certain.write(write)
                touched.update(_blocks_of(write))
            window.clear()


def _said(index: int, write: Write) -> str:
    return f"event {index}: {len(write.data)} bytes at {write.offset}"


def _blocks_of(write: Write) -> range:
    last = write.offset + len(write.data) - 1
    return range(write.offset // _BLOCK, last // _BLOCK + 1)


def _parts(write: Write) -> Iterator[Write]:
    """Yield the beginnings and ends of a write, torn at sectors of its first page and at pages."""
    nbytes = len(write.data)
    pages = range(_BLOCK, nbytes, _BLOCK)
    cuts = {*range(_SECTOR, min(nbytes, _BLOCK), _SECTOR), *pages[:: len(pages) // _MOST_CUTS + 1]}
    for cut in sorted(cuts):
        yield Write(write.offset, write.data[:cut])
        yield Write(write.offset + cut, write.data[cut:])


@contextlib.contextmanager
def mounted(image: Path, kind: str, where: Path, options: str = "") -> Iterator[None]:
    """Mount an image for reading, with few system calls: it is done thousands of times.

    The journal is replayed all the same.

    Raises:
        OSError: the file system is broken.
    """
    device, loop = _attached(image)
    try:
        words = (device.encode(), os.fsencode(where), kind.encode(), _MS_RDONLY, options.encode())
        if _libc.mount(*words) != 0:
            raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            while _libc.umount2(os.fsencode(where), 0) != 0:
                if ctypes.get_errno() != errno.EBUSY:
                    raise OSError(ctypes.get_errno(), "umount")
    finally:
        os.close(loop)


def _attached(image: Path) -> tuple[str, int]:
    """Return a loop device of an image, and its descriptor: detached when nobody has it open."""
    info = bytearray(_LOOP_INFO64)
    struct.pack_into("=I", info, _FLAGS_AT, _AUTOCLEAR)
    file = os.open(image, os.O_RDWR)
    control = os.open("/dev/loop-control", os.O_RDWR)
    try:
        while True:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop = os.open(device, os.O_RDWR)
            try:
                fcntl.ioctl(loop, _LOOP_SET_FD, file)
                fcntl.ioctl(loop, _LOOP_SET_STATUS64, bytes(info))
                return device, loop
            except OSError as error:  # another process was faster
                os.close(loop)
                if error.errno != errno.EBUSY:
                    raise
    finally:
        os.close(control)
        os.close(file)
