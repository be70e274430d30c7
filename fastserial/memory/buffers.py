"""Staging buffers: aligned host memory (`BufferPool`), or pinned memory for devices (`Ring`).

The pool is the only memory a save needs beyond the objects themselves. Its size does not depend on
the size of the checkpoint. Storages on devices pass through it in chunks, too.

A `Ring` never waits for a copy before its buffer is needed: a save checksums and writes the blocks
that have arrived while later ones are copied, and a load fills a buffer again once the device has
copied its content. Its memory is kept between saves; `free_pinned` frees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastserial.config import PAST_HOST, Config, current
from fastserial.config.performance import PAGE, PINNED_MOST, PINNED_RING, THROUGH_RING
from fastserial.errors import EngineError
from fastserial.interrupts import Locked, cleanup, finish, finish_after, ours, suppress
from fastserial.memory import devices
from fastserial.memory.devices import Pinned
from fastserial.memory.storages import DeviceMemory, memmove
from fastserial.reports import HOST_ONLY, Transfer

if TYPE_CHECKING:
    import torch


def host_buffer(address: int, nbytes: int) -> Buffer:
    """Return host memory at an address as a buffer; the caller keeps the memory alive."""
    view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    return Buffer(-1, view, address)


def own_buffer(nbytes: int) -> Buffer:
    """Return new host memory, for something small, as a buffer that keeps it alive."""
    memory = (ctypes.c_char * nbytes)()
    return Buffer(-1, memoryview(memory).cast("B"), ctypes.addressof(memory))


class Buffer:
    """One page-aligned buffer: `address`, `nbytes`, and `view`, a writable memoryview of it."""

    __slots__ = ("address", "index", "nbytes", "view")

    def __init__(self, index: int, view: memoryview, address: int) -> None:
        self.index = index
        self.view = view
        self.address = address
        self.nbytes = len(view)


class BufferPool:
    """A fixed number of equal buffers in one anonymous mapping.

    Not thread-safe: the thread that submits requests takes and gives back.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        """Map `count` buffers of `nbytes` bytes (a multiple of the page size) each."""
        self._map = mmap.mmap(-1, count * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # fewer faults, and fewer pages to pin for direct I/O
            self._map.madvise(mmap.MADV_HUGEPAGE)
        anchor = ctypes.c_char.from_buffer(self._map)
        self._anchor: ctypes.c_char | None = anchor
        self._divide(memoryview(self._map), ctypes.addressof(anchor), count, nbytes)

    def _divide(self, whole: memoryview, address: int, count: int, nbytes: int) -> None:
        """Make the buffers; `whole` shows the memory at `address`."""
        self.buffers: Sequence[Buffer] = [
            Buffer(i, whole[i * nbytes : (i + 1) * nbytes], address + i * nbytes)
            for i in range(count)
        ]
        self._whole = whole
        self._free = list(reversed(self.buffers))

    @property
    def free(self) -> int:
        """Number of buffers that can be taken."""
        return len(self._free)

    def take(self) -> Buffer:
        """Take a free buffer.

        Raises:
            EngineError: there is none.
        """
        if not self._free:
            raise EngineError("no free staging buffer")
        return self._free.pop()

    def give(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        self._free.append(buffer)

    def close(self) -> None:
        """Unmap the memory. No request may be using a buffer any more."""
        self._free.clear()
        for buffer in self.buffers:
            buffer.view.release()
        self.buffers = ()
        self._whole.release()
        self._unmap()

    def _unmap(self) -> None:
        self._anchor = None
        # an error's traceback may still refer to a buffer, and keeps the memory
        with contextlib.suppress(BufferError):
            self._map.close()


class Ring(BufferPool):
    """Staging buffers in pinned memory, and the copies between them and devices.

    One thread takes buffers and gives them back, as with any pool; who has a buffer may fetch to
    it and send from it, on any thread.
    """

    def __init__(self, pinned: Pinned, count: int, nbytes: int) -> None:
        """Divide pinned memory into up to `count` buffers of `nbytes` bytes, a multiple of 4096."""
        before = -pinned.address % PAGE
        count = min(count, (pinned.nbytes - before) // nbytes)
        address = pinned.address + before
        anchor: Any = (ctypes.c_char * (count * nbytes)).from_address(address)
        anchor.owner = pinned  # a block that is being written keeps its memory, even after `close`
        view = memoryview(anchor).cast("B")
        self._pinned: Pinned | None = pinned
        self._base = pinned.address
        self._streams = pinned.streams
        # by buffer; with what is copied, which must stay until then
        self._fences: list[list[tuple[torch.Event, object]]] = [[] for _ in range(count)]
        self._first = address
        self._divide(view, address, count, nbytes)

    def join(self, used_devices: Iterable[torch.device]) -> bool:
        """Get ready for copies from and to devices; False: one of them has no streams.

        The copies follow the work now queued on the calling thread's current streams.
        """
        for device in used_devices:
            stream = self._streams.get(device) or devices.copy_stream(device)
            if stream is None:
                return False
            stream.follow()
            self._streams[device] = stream
        return True

    def take(self) -> Buffer:
        """Take the buffer that was given back first, once no copy needs it any more.

        Raises:
            EngineError: there is none.
            RuntimeError: a copy failed.
        """
        if self._free:
            self._free.append(self._free.pop(0))  # the base class takes the last
        buffer = super().take()
        self.arrive(buffer)
        return buffer

    def fetch(self, buffer: Buffer, pieces: Iterable[tuple[int, DeviceMemory, int, int]]) -> None:
        """Start copies from devices to a buffer.

        Args:
            buffer: one that was taken.
            pieces: (byte of the buffer, memory, first byte, bytes) of each copy.

        Raises:
            StorageChangedError: a storage was resized.
        """

        def views() -> Iterator[tuple[int, torch.Tensor]]:
            for at, memory, start, length in pieces:
                memory.check()
                for first, view in memory.views(start, length):
                    yield at + first, view

        self.fetch_views(buffer, views())

    def fetch_views(self, buffer: Buffer, views: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Start copies of views of any strides to a buffer, each to a byte of it."""
        used: dict[torch.device, list[torch.Tensor]] = {}
        try:
            for at, view in views:
                used.setdefault(view.device, []).append(view)
                host = self._host(buffer.address + at, view.nbytes)
                self._streams[view.device].fetch(view, host.view(view.dtype).view(view.shape))
        finally:
            self._fences[buffer.index] += [
                (self._streams[device].mark(), some) for device, some in used.items()
            ]

    def arrive(self, buffer: Buffer) -> None:
        """Wait for the copies to and from a buffer.

        Raises:
            RuntimeError: a copy failed.
        """
        fences = self._fences[buffer.index]
        while fences:
            fences[-1][0].synchronize()
            fences.pop()

    def host(self, buffer: Buffer, length: int) -> torch.Tensor:
        """Return the first bytes of a buffer, one-dimensional uint8."""
        return self._host(buffer.address, length)

    def keep(self, buffer: Buffer, fence: torch.Event, used: object) -> None:
        """Let a buffer wait for an event of another stream, and keep an object until then."""
        self._fences[buffer.index].append((fence, used))

    def holds(self, address: int, length: int) -> bool:
        """Return whether host memory is in a buffer of this ring."""
        return self._first <= address and address + length <= self._first + len(self._whole)

    def send(self, address: int, length: int, target: torch.Tensor) -> None:
        """Start a copy of a buffer's bytes to a device's memory, one-dimensional uint8."""
        stream = self._streams[target.device]
        stream.send(self._host(address, length), target)
        nbytes = self.buffers[0].nbytes
        self._fences[(address - self._first) // nbytes].append((stream.mark(), target))

    def settle(self) -> None:
        """Wait for all copies.

        Then every stream sees what was sent, as after a copy of torch's. It would not be enough if
        only the caller's current stream waited.

        Raises:
            RuntimeError: a copy failed.
        """
        for buffer in self.buffers:
            self.arrive(buffer)

    def _host(self, address: int, length: int) -> torch.Tensor:
        if self._pinned is None:
            raise ValueError("the ring is closed")
        start = address - self._base
        return self._pinned.whole[start : start + length]

    def close(self) -> None:
        """Wait for all copies, and keep the memory for the next ring. Idempotent."""
        if self._pinned is not None:
            finish(self.settle, super().close)

    def _unmap(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned_store.give(pinned)


class PinnedStore:
    """The pinned memory of a process: `PINNED_MOST` bytes, in pieces of `PINNED_RING`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save, too
        self._kept: list[Pinned] = []
        self._all: weakref.WeakSet[Pinned] = weakref.WeakSet()  # in use, or kept

    @property
    def has_kept(self) -> bool:
        """Whether memory of an earlier save or load is there, and not in use."""
        return bool(self._kept)

    def take(self) -> Pinned | None:
        """Return `PINNED_RING` bytes; None: other saves or loads use all that is allowed.

        Raises:
            RuntimeError: the system has none.
        """
        with Locked(self._lock):
            if self._kept:
                return self._kept.pop()
            if (len(self._all) + 1) * PINNED_RING > PINNED_MOST:
                return None
            pinned = devices.pin(PINNED_RING)
            self._all.add(pinned)
            return pinned

    def give(self, pinned: Pinned) -> None:
        """Keep memory that nothing uses any more, for the next ring."""
        with Locked(self._lock):
            self._kept.append(pinned)

    def free(self) -> int:
        """Free what is not in use, and return how many bytes that was."""
        with Locked(self._lock):
            nbytes = sum(pinned.nbytes for pinned in self._kept)
            self._kept.clear()
        if nbytes:
            devices.unpin()
        return nbytes

    def forget(self) -> None:
        """Start over in a forked child: the device and its pinned memory are the parent's."""
        _parents.extend(self._all)
        self.__init__()  # type: ignore[misc]


_parents: list[Pinned] = []
pinned_store = PinnedStore()
os.register_at_fork(after_in_child=pinned_store.forget)


def free_pinned() -> int:
    """Free the pinned host memory that is kept for the next save or load of device tensors.

        print(fastserial.free_pinned(), "bytes freed")

    Returns:
        Bytes freed; memory that a save or load is using is kept.
    """
    return pinned_store.free()


_log = logging.getLogger("fastserial")
_warned: set[str] = set()


def instead(word: str, why: str) -> Transfer:
    """Return the substitute for a transfer type that is not available; warn of it once."""
    if word not in _warned:
        _warned.add(word)
        text = f"transfer {word!r}: {why}; going on with 'cpu_async_gpu'"
        warnings.warn(text, UserWarning, stacklevel=2)
    return Transfer("cpu_async_gpu", f"{word}: {why}")


def on_host(config: Config) -> Transfer:
    """Return the transfer type of a file whose tensors are all on the host, and why it is none."""
    word = config.transfer
    return Transfer("cpu", f"{word}: no tensor is on a device") if word in PAST_HOST else HOST_ONLY


def open_ring(
    config: Config,
    used_devices: Collection[torch.device],
    any_memory: bool = True,
    undivided: bool = False,
) -> tuple[Ring | None, Transfer]:
    """Return a ring for copies from and to devices, or None, and the transfer type that it is.

    The copies follow the work now queued on the calling thread's current streams. Without a ring
    each copy is waited for.

    Args:
        config: the options in force.
        used_devices: the devices.
        any_memory: the engine moves blocks from and to any memory, not only its own.
        undivided: all memory is one buffer.
    """
    word, why = config.transfer, "asked for"
    if word in ("cpu", "cpu_gpu"):
        return None, Transfer("cpu_gpu", why)
    if word == "auto":
        word, why = "cpu_async_gpu", "auto: pinned memory and streams of its own"
    elif word in PAST_HOST:
        word, why = "cpu_async_gpu", f"{word}: for blocks of files only"
    ring = _new_ring(config, used_devices, any_memory, undivided)
    if isinstance(ring, str):
        _log.debug("device tensors go through the host, one copy after the other: %s", ring)
        return None, Transfer("cpu_gpu", ring)
    try:
        ring.join(used_devices)
    except BaseException as error:
        finish_after(error, ring.close)
        raise
    return ring, Transfer(word, why)


def _new_ring(
    config: Config, used_devices: Collection[torch.device], any_memory: bool, undivided: bool
) -> Ring | str:
    """Return a ring, or why there is none."""
    nbytes = PINNED_RING - PAGE if undivided else config.block_size
    count = min(2 * config.queue_depth, PINNED_RING // nbytes)
    if not any_memory:
        return "the engine has buffers of its own"
    if count < 2 and not undivided:
        return "two blocks are more than the pinned memory: set a smaller block_size"
    for device in used_devices:
        if not devices.has_streams(device):
            return f"torch has no streams for {device.type}"
    try:
        pinned = pinned_store.take()
    except ours(RuntimeError) as error:
        return f"no pinned memory: {error}"
    if pinned is None:
        return "other saves or loads use the pinned memory"
    return Ring(pinned, count, nbytes)


def copy_to_host(memory: DeviceMemory, address: int, start: int, length: int) -> None:
    """Copy bytes [start, start + length) of a device's memory to any host memory.

    Large memory goes through a ring: the host copies the chunks that have arrived, while the device
    copies the rest.

    Raises:
        StorageChangedError: the storage was resized.
    """
    config = current()
    ring = open_ring(config, {memory.device})[0] if length >= THROUGH_RING else None
    if ring is None:
        memory.copy_to(address, start, length)
        return
    size = config.block_size
    under_way: deque[tuple[Buffer, int]] = deque()
    at = 0
    with cleanup(ring.close):
        while at < length or under_way:
            if at < length and ring.free:
                buffer = ring.take()
                ring.fetch(buffer, [(0, memory, start + at, min(size, length - at))])
                under_way.append((buffer, at))
                at += size
                continue
            buffer, done = under_way.popleft()
            ring.arrive(buffer)
            memmove(address + done, buffer.address, min(size, length - done))
            ring.give(buffer)
        memory.check()
