"""Blocks that go between files and devices past the host: GPUDirect Storage.

Each staging buffer of the ring has a slot of its size on the device, in memory that is registered
with the driver once and kept. A save copies a block to its slot, on the device, and has the slot
written; a load has the slot filled and copies on. So all that the driver sees is aligned, however
tensors lie; what is written cannot change meanwhile; and what is checksummed on the host are the
bytes of the slot. The ring's order holds for the slots: a buffer is taken again when all is over
that was queued for it, and nothing is closed before.

    gds        the engine's threads make synchronous calls
    gpu_async  calls that are queued on streams, one stream for each slot
    gpu_batch  the engine's threads give the driver the pieces of a block together
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from fastserial.config import Config
from fastserial.config.performance import PAGE, PINNED_RING
from fastserial.engines import Engine, Op, Request
from fastserial.engines.gds import cufile
from fastserial.engines.gds.cufile import Call, CuFile, DirectTransferError, Region
from fastserial.engines.threads import transfer
from fastserial.files.linux import open_direct
from fastserial.interrupts import Descriptors, finish
from fastserial.memory import devices
from fastserial.memory.buffers import DIRECT, freed_with_it, instead
from fastserial.reports import Transfer

if TYPE_CHECKING:
    import torch

    from fastserial.memory.buffers import Buffer, Ring
    from fastserial.memory.devices import CopyStream
    from fastserial.memory.storages import StorageMemory

__all__ = ["DirectMemory", "missing", "offer"]

Move = Callable[[Request], int]


def missing(word: str) -> str | None:
    """Return why a transfer type cannot be had on this machine, or None."""
    return cufile.missing() if word in DIRECT else None


def offer(
    config: Config,
    taken: Transfer,
    ring: Ring | None,
    engine: Engine,
    places: Collection[torch.device],
    fd: int,
    flags: int,
    refusal: str | None,
) -> tuple[DirectMemory | None, Transfer]:
    """Return the way past the host, if it was asked for and can be had, and the transfer type.

    Args:
        config: the options in force.
        taken: the transfer type without it.
        ring: what the blocks pass through that do not take this way; None: there is none.
        engine: what moves blocks.
        places: the devices, which have contexts.
        fd: of the file.
        flags: how to open it once more.
        refusal: why the file takes no direct I/O, if that is known.
    """
    word = config.transfer
    if word not in DIRECT or ring is None:
        return None, taken
    why = missing(word) or refusal
    if why is None and not engine.capabilities.device_memory:
        why = f"engine {engine.name!r} does not move device memory"
    served = [place for place in places if cufile.serves(place)]
    if why is None and not served:
        why = "cuFile serves CUDA devices only"
    if why is None:
        try:
            driver = cufile.open_driver(served[0])
            way = DirectMemory(driver, config, ring, served, fd, flags)
        except (OSError, RuntimeError) as error:
            why = str(error)
        else:
            return way, way.transfer
    return None, instead(word, why)


_CALLS = PINNED_RING // PAGE  # as many slots as there can be


class Slots:
    """Memory of a device, and the parameters of the calls for it, one for each slot."""

    def __init__(self, driver: CuFile, device: torch.device) -> None:
        """Allocate and register.

        Raises:
            RuntimeError: the device or the host has not enough memory.
        """
        import torch

        whole = torch.empty(PINNED_RING + PAGE, dtype=torch.uint8, device=device)
        before = -whole.data_ptr() % PAGE
        self.driver, self.device = driver, device
        self.whole = whole[before : before + PINNED_RING]
        # NVIDIA wants what an asynchronous write reports in pinned memory
        self._pinned = devices.pin(_CALLS * ctypes.sizeof(Call))
        self.calls = (Call * _CALLS).from_address(self._pinned.address)
        address = self.whole.data_ptr()
        with driver.on(device):
            registered = driver.register(address, PINNED_RING)
        self.region = Region(device, address, registered)
        self.streams: list[CopyStream] = []  # kept: torch has 32, the program's among them

    def provide_streams(self, count: int) -> None:
        """Get ready for `stream`: slots in turn are copied on `count` streams, or on more."""
        while len(self.streams) < count:
            stream = devices.copy_stream(self.device)
            if stream is None:
                return
            self.streams.append(stream)

    def stream(self, slot: int) -> CopyStream:
        """Return the stream on which a slot is copied to and from."""
        return self.streams[slot % len(self.streams)]

    def release(self) -> None:
        """Let go of the memory; nothing uses it."""
        if self.region.registered:
            with self.driver.on(self.device):
                self.driver.release(self.region.address)


_lock = threading.RLock()  # a signal handler may save, too
_kept: list[Slots] = []  # for the next save or load
_parents: list[Slots] = []


def take_slots(driver: CuFile, device: torch.device) -> Slots:
    """Return slots that nobody uses.

    Raises:
        RuntimeError: the device or the host has not enough memory.
    """
    with _lock:
        for slots in _kept:
            if slots.device == device and slots.driver is driver:
                _kept.remove(slots)
                return slots
    return Slots(driver, device)


def give_slots(slots: Slots) -> None:
    """Take slots back that nothing uses any more."""
    with _lock:
        _kept.append(slots)


def _free_slots() -> None:
    with _lock:
        while _kept:
            _kept.pop().release()


def _forget_slots() -> None:
    """Begin anew in a forked child: the device's memory is the parent's."""
    _parents.extend(_kept)
    _kept.clear()


freed_with_it.append(_free_slots)
os.register_at_fork(after_in_child=_forget_slots)


_lost: set[DirectMemory] = set()  # of which nobody knows what cuFile still does


class DirectMemory:
    """The slots of a ring, for one file. Its ring is closed after it.

    What `write` and `read` return is the `move` of the block's request. A block whose transfer
    fails goes through the host, as do all that come after it; `transfer` says why then.
    """

    def __init__(
        self,
        driver: CuFile,
        config: Config,
        ring: Ring,
        places: Collection[torch.device],
        fd: int,
        flags: int,
    ) -> None:
        """Open the file once more, for the driver, which serves the devices.

        Raises:
            DirectTransferError: the driver, the device or the file does not take part.
            RuntimeError: there is no memory.
        """
        self.transfer = Transfer(config.transfer, f"asked for: {driver.name}")
        self._refused = False  # no more blocks
        self._driver, self._ring, self._block = driver, ring, config.block_size
        self._word = config.transfer
        self._places: dict[torch.device, Slots] = {}
        self._files = Descriptors()
        self._file: int | None = None
        self._pid = os.getpid()
        try:
            found = open_direct(fd, flags, config.block_size, self._files)
            if found.refusal is not None:
                raise DirectTransferError(found.refusal)
            self.alignment = found.alignment
            plain = self._files.reopen_plain(found.fd, flags | os.O_DIRECT)
            self.join(places)
            with driver.on(next(iter(self._places))):
                self._file = driver.open_file(plain)
        except BaseException:
            self.close()
            raise

    def join(self, places: Iterable[torch.device]) -> None:
        """Take part in transfers from and to devices, after what the caller's streams hold now.

        Raises:
            RuntimeError: there is no memory.
        """
        for device in places:
            if device not in self._places and cufile.serves(device):
                count = len(self._ring.buffers) if self._word == "gpu_async" else 1
                slots = self._places[device] = take_slots(self._driver, device)
                slots.provide_streams(count)
            if device in self._places:
                for stream in self._places[device].streams:
                    stream.follow()

    def takes(self, device: torch.device, offset: int, length: int) -> bool:
        """Return whether a block of a device's memory can go this way."""
        aligned = not (offset | length) % self.alignment and 0 < length <= self._block
        return aligned and not self._refused and device in self._places

    def write(
        self, buffer: Buffer, memory: StorageMemory, start: int, length: int, shown: bool
    ) -> Move:
        """Start to write bytes of a device's memory to the file.

        Args:
            buffer: of the ring, taken; its slot is used.
            memory, start, length: what to write.
            shown: copy the bytes to the buffer, too; they are there when the ring says so.

        Raises:
            StorageChangedError: the storage was resized.
        """
        memory.check()
        place = self._places[memory.device]
        stream, slot = place.stream(buffer.index), self._slot(place, buffer, length)
        stream.fetch(memory.whole[start : start + length], slot)
        if shown:
            stream.fetch(slot, self._ring.host(buffer, length))
        self._ring.keep(buffer, stream.mark(), memory.whole)
        return partial(self._move, place, shown, None)

    def read(self, target: torch.Tensor) -> Move:
        """Return what reads bytes of the file to a device's memory, one-dimensional uint8.

        They are there when the ring has settled. If they go through the host, they are in the
        buffer, and `Request.move` is None.
        """
        return partial(self._move, self._places[target.device], False, target)

    def close(self) -> None:
        """Wait for all transfers, and keep the memory for the next. Idempotent."""
        finish(self._end_streams, self._let_go)

    def __del__(self) -> None:
        if self._pid == os.getpid() and not sys.is_finalizing():
            self.close()  # nothing is under way: the slots are for the next

    # -- one block -----------------------------------------------------------------------------

    def _slot(self, place: Slots, buffer: Buffer, length: int) -> torch.Tensor:
        start = buffer.index * self._block
        return place.whole[start : start + length]

    def _move(
        self,
        place: Slots,
        shown: bool,
        target: torch.Tensor | None,
        request: Request,
    ) -> int:
        """Move a block; see the class.

        Raises:
            DirectTransferError: nobody knows whether its memory is still used.
            OSError: the host could not move it, either.
        """
        try:
            return self._past_the_host(place, target, request)
        except DirectTransferError as error:
            if not error.settled:
                raise
            if not self._refused:
                self._refused = True
                self.transfer = instead(self.transfer.word, f"{error}; from there on")
            request.move = None
            if request.op is Op.WRITE and not shown:
                stream = place.stream(request.buffer.index)
                slot = self._slot(place, request.buffer, request.length)
                stream.fetch(slot, self._ring.host(request.buffer, request.length))
                self._ring.keep(request.buffer, stream.mark(), place)
            self._ring.arrive(request.buffer)
            try:
                return transfer(request)
            except OSError as own:  # the system's word for what is wrong
                raise own from error

    def _past_the_host(self, place: Slots, target: torch.Tensor | None, request: Request) -> int:
        op, buffer, offset, length = request.op, request.buffer, request.offset, request.length
        first = buffer.index * self._block
        self._ring.arrive(buffer)
        done = 0
        with self._driver.on(place.device):
            if self._word == "gpu_async":
                done = self._move_on_stream(request, place, first)
            elif self._word == "gpu_batch":
                done = self._move_batch(request, place, first)
            while done < length:  # goes on after a short transfer, on a page of its own
                done -= done % self.alignment
                call = Call(length - done, offset + done, first + done, 0)
                moved = self._driver.move(op, self._opened_file(), place.region, call)
                moved = self._checked(moved, call.size)
                if moved < min(self.alignment, call.size):
                    what = "written" if op is Op.WRITE else "read"
                    raise DirectTransferError(
                        f"{self._driver.name}: only {done + moved} of {length} bytes were {what}"
                    )
                done += moved
        if target is not None:
            stream = place.stream(buffer.index)
            stream.send(self._slot(place, buffer, length), target)
            self._ring.keep(buffer, stream.mark(), target)
        return done

    def _move_on_stream(self, request: Request, place: Slots, first: int) -> int:
        """Queue the transfer of a block on its stream; return how many bytes were moved."""
        buffer = request.buffer
        call, stream = place.calls[buffer.index], place.stream(buffer.index)
        call.size, call.offset, call.start = request.length, request.offset, first
        call.moved = 0
        self._driver.start(request.op, self._opened_file(), place.region, call, stream.handle)
        self._ring.keep(buffer, stream.mark(), place)
        self._ring.arrive(buffer)
        return self._checked(call.moved, request.length)

    def _move_batch(self, request: Request, place: Slots, first: int) -> int:
        """Move the pieces of a block together; return how many bytes were, up to the first gap."""
        size, length = self._driver.largest_piece, request.length
        calls = [
            Call(min(size, length - at), request.offset + at, first + at, 0)
            for at in range(0, length, size)
        ]
        try:
            self._driver.move_batch(request.op, self._opened_file(), place.region, calls)
        except DirectTransferError as error:
            if not error.settled:
                _lost.add(self)
            raise
        except BaseException:  # an interrupt: who knows whether they were started
            _lost.add(self)
            raise
        done = 0
        for call in calls:
            moved = self._checked(call.moved, call.size)
            done += moved
            if moved < call.size:
                break
        return done

    def _checked(self, moved: int, most: int) -> int:
        if 0 <= moved <= most:
            return moved
        what = self._driver.describe(moved) if moved < 0 else f"{moved} of {most} bytes moved"
        raise DirectTransferError(f"{self._driver.name}: {what}", max(0, -moved))

    def _opened_file(self) -> int:
        if self._file is None:
            raise ValueError("the file is closed")
        return self._file

    # -- the end -------------------------------------------------------------------------------

    def _end_streams(self) -> None:
        try:
            for place in self._places.values():
                for stream in place.streams:
                    stream.mark().synchronize()
        except RuntimeError:  # the device failed
            _lost.add(self)
            raise

    def _let_go(self) -> None:
        if self in _lost:  # all that the device may be using is kept for good
            return
        file, self._file = self._file, None
        if file is not None:
            self._driver.close_file(file)
        self._files.close()
        while self._places:
            give_slots(self._places.popitem()[1])
