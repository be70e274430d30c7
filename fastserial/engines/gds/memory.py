"""Blocks that go between files and devices past the host: GPUDirect Storage.

Each staging buffer of the ring has a slot of its size on the device, in memory that is registered
with the driver. A save copies a block to its slot, on the device, and has the slot written; a load
has the slot filled and copies from it. So the driver sees aligned memory only, however tensors
lie; what is written cannot change meanwhile; and the host checksums the bytes of the slot. The
ring's order holds for the slots: a buffer is taken again when everything queued for it is complete,
and nothing is closed before.

The threads of the engine make cuFile's synchronous calls, several at once. `gpu_async` and
`gpu_batch` are accepted, and do the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from fastserial.config import PAST_HOST, Config
from fastserial.config.performance import PAGE, PINNED_RING
from fastserial.engines import Engine, Op, Request
from fastserial.engines.gds import cufile
from fastserial.engines.gds.cufile import CuFile, DirectTransferError
from fastserial.engines.threads import transfer
from fastserial.files.linux import open_direct
from fastserial.interrupts import Descriptors, finish, finish_after, ours
from fastserial.memory import devices
from fastserial.memory.buffers import instead
from fastserial.reports import Transfer

if TYPE_CHECKING:
    import torch

    from fastserial.memory.buffers import Buffer, Ring
    from fastserial.memory.storages import StorageMemory


Move = Callable[[Request], int]


def missing(word: str) -> str | None:
    """Return why a transfer type is not available on this machine, or None."""
    return cufile.missing() if word in PAST_HOST else None


def offer(
    config: Config,
    taken: Transfer,
    ring: Ring | None,
    engine: Engine,
    used_devices: Collection[torch.device],
    fd: int,
    flags: int,
    refusal: str | None,
) -> tuple[DirectMemory | None, Transfer]:
    """Return the path past the host, if it is asked for and available, and the transfer type.

    Args:
        config: the options in force.
        taken: the transfer type without it.
        ring: what all other blocks pass through; None: there is none.
        engine: what moves blocks.
        used_devices: the devices, which have contexts.
        fd: of the file.
        flags: how to open it once more.
        refusal: why the file takes no direct I/O, if that is known.
    """
    word = config.transfer
    if word not in PAST_HOST or ring is None:
        return None, taken
    served = [device for device in used_devices if cufile.serves(device)]
    why = missing(word) or refusal
    if why is None and not engine.capabilities.device_memory:
        why = f"engine {engine.name!r} does not move device memory"
    if why is None and not served:
        why = "cuFile serves CUDA devices only"
    if why is None:
        try:
            driver = cufile.open_driver(served[0])
            path = DirectMemory(driver, config, ring, served, fd, flags)
        except ours(OSError, RuntimeError) as error:
            why = str(error)
        else:
            return path, path.transfer
    return None, instead(word, why)


class DeviceSlots:
    """Device memory that the driver knows, and a stream for copies from and to it."""

    def __init__(self, driver: CuFile, device: torch.device) -> None:
        """Allocate and register `PINNED_RING` bytes.

        Raises:
            RuntimeError: the device has not enough memory, or no streams.
            DirectTransferError: the driver refuses the memory.
        """
        import torch

        stream = devices.copy_stream(device)
        if stream is None:
            raise RuntimeError(f"torch has no streams for {device.type}")
        memory = torch.empty(PINNED_RING + PAGE, dtype=torch.uint8, device=device)
        before = -memory.data_ptr() % PAGE
        self.device, self.stream = device, stream
        self.memory = memory[before : before + PINNED_RING]
        self.address = self.memory.data_ptr()
        with driver.on(device):
            driver.register(self.address, PINNED_RING)


class DirectMemory:
    """The device slots of a ring, for one file. The ring is closed after it.

    `write` and `read` return the `move` of a block's request. If a transfer fails, this
    block and all later ones are transferred through the host; `transfer` then gives the reason.
    """

    def __init__(
        self,
        driver: CuFile,
        config: Config,
        ring: Ring,
        used_devices: Collection[torch.device],
        fd: int,
        flags: int,
    ) -> None:
        """Open the file once more, for the driver, which serves the devices.

        Raises:
            DirectTransferError: the driver or the file refuses.
            RuntimeError: there is no memory.
        """
        self._word = config.transfer
        asked = "asked for" if self._word == "gds" else f"{self._word} is taken as gds"
        self.transfer = Transfer("gds", f"{asked}: {driver.name}")
        self._refused = False  # no more blocks
        self._driver, self._ring, self._block = driver, ring, config.block_size
        self._slots: dict[torch.device, DeviceSlots] = {}
        self._files = Descriptors()
        self._file: int | None = None
        self._pid = os.getpid()
        try:
            found = open_direct(fd, flags, config.block_size, self._files)
            if found.refusal is not None:
                raise DirectTransferError(found.refusal)
            self.alignment = found.alignment
            plain = self._files.reopen_plain(found.fd, flags | os.O_DIRECT)
            self.join(used_devices)
            with driver.on(next(iter(self._slots))):
                self._file = driver.open_file(plain)
        except BaseException as error:
            finish_after(error, self.close)
            raise

    def join(self, used_devices: Iterable[torch.device]) -> None:
        """Prepare for transfers of devices, after the work now queued on the caller's streams.

        Raises:
            RuntimeError: there is no memory.
            DirectTransferError: the driver refuses the memory.
        """
        for device in used_devices:
            if device not in self._slots and cufile.serves(device):
                self._slots[device] = DeviceSlots(self._driver, device)
            if device in self._slots:
                self._slots[device].stream.follow()

    def takes(self, device: torch.device, offset: int, length: int) -> bool:
        """Return whether a block of a device's memory can go past the host."""
        aligned = not (offset | length) % self.alignment and 0 < length <= self._block
        return aligned and not self._refused and device in self._slots

    def write(
        self, buffer: Buffer, memory: StorageMemory, start: int, length: int, shown: bool
    ) -> Move:
        """Start to write bytes of a device's memory to the file.

        Args:
            buffer: of the ring, taken; its slot is used.
            memory, start, length: what to write.
            shown: copy the bytes to the buffer, too; `Ring.arrive` waits for them.

        Raises:
            StorageChangedError: the storage was resized.
        """
        memory.check()
        slots = self._slots[memory.device]
        slot = self._slot(slots, buffer, length)
        view = memory.view(start, length)
        slots.stream.fetch(view, slot)
        if shown:
            slots.stream.fetch(slot, self._ring.host(buffer, length))
        self._ring.keep(buffer, slots.stream.mark(), view)
        return partial(self._move, slots, shown, None)

    def read(self, target: torch.Tensor) -> Move:
        """Return what reads bytes of the file to a device's memory, one-dimensional uint8.

        They are there when the ring has settled. If they go through the host, they are in the
        buffer, and `Request.move` is None.
        """
        return partial(self._move, self._slots[target.device], False, target)

    def close(self) -> None:
        """Wait for all transfers, and free what they used. Idempotent."""
        finish(self._end_streams, self._free)

    def __del__(self) -> None:
        if self._pid == os.getpid() and not sys.is_finalizing():
            self.close()

    def _slot(self, slots: DeviceSlots, buffer: Buffer, length: int) -> torch.Tensor:
        start = buffer.index * self._block
        return slots.memory[start : start + length]

    def _move(
        self, slots: DeviceSlots, shown: bool, target: torch.Tensor | None, request: Request
    ) -> int:
        """Move a block; see the class.

        Raises:
            OSError: the host could not move it, either.
        """
        buffer, length = request.buffer, request.length
        slot = self._slot(slots, buffer, length)
        try:
            self._ring.arrive(buffer)
            with self._driver.on(slots.device):
                self._past_the_host(slots, request)
        except ours(DirectTransferError) as error:
            if not self._refused:
                self._refused = True
                self.transfer = instead(self._word, f"{error}; from there on")
            request.move = None
            if request.op is Op.WRITE and not shown:
                slots.stream.fetch(slot, self._ring.host(buffer, length))
                self._ring.keep(buffer, slots.stream.mark(), slots)
            self._ring.arrive(buffer)
            try:
                return transfer(request)
            except ours(OSError) as own:  # the system's error has the cause
                raise own from error
        if target is not None:
            slots.stream.send(slot, target)
            self._ring.keep(buffer, slots.stream.mark(), target)
        return length

    def _past_the_host(self, slots: DeviceSlots, request: Request) -> None:
        """Move a block between its slot and the file; continue after a short transfer.

        Raises:
            DirectTransferError: it was not moved as a whole.
        """
        first, length, done = request.buffer.index * self._block, request.length, 0
        if self._file is None:
            raise ValueError("the file is closed")
        while done < length:
            done -= done % self.alignment
            rest = length - done
            moved = self._driver.move(
                request.op, self._file, slots.address, first + done, rest, request.offset + done
            )
            if not min(self.alignment, rest) <= moved <= rest:
                what = "written" if request.op is Op.WRITE else "read"
                raise DirectTransferError(
                    f"{self._driver.name}: {done + moved} of {length} bytes were {what}"
                )
            done += moved

    def _end_streams(self) -> None:
        for slots in self._slots.values():
            slots.stream.mark().synchronize()

    def _free(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._driver.close_file(file)
        self._files.close()
        while self._slots:
            device, slots = self._slots.popitem()
            with self._driver.on(device):
                self._driver.release(slots.address)
