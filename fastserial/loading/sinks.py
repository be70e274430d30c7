"""Destinations of the bytes of a read extent: host memory or a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from fastserial.checksums import CrcLedger, crc32
from fastserial.memory.buffers import Buffer, host_buffer, own_buffer
from fastserial.memory.storages import HostMemory, is_on_host, memmove

if TYPE_CHECKING:
    import torch

    from fastserial.memory.buffers import Ring


class Sink(Protocol):
    """Receives the bytes of one extent, in pieces, in any order, on any thread."""

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        """Receive `view`, at host address `address`: the extent's bytes from `start` on."""

    def memory_for(self, start: int, length: int) -> Buffer | None:
        """Return host memory that these bytes may be read into before they are delivered.

        They may begin before the extent and end after it, if the sink has memory there.
        """


class ReadExtent(NamedTuple):
    """`length` bytes at `offset` of a file; `sink` takes them as its bytes from `start` on."""

    offset: int
    length: int
    sink: Sink
    start: int = 0

    @property
    def end(self) -> int:
        """First byte of the file after it."""
        return self.offset + self.length

    def part(self, first: int, stop: int) -> ReadExtent:
        """Return the part in range [first, stop) of the file."""
        return ReadExtent(first, stop - first, self.sink, self.start + first - self.offset)


class HostSink(HostMemory):
    """Host memory that receives the bytes of an extent.

    The `spare` bytes before and after it may be written, too: direct reads move whole blocks.
    """

    __slots__ = ("_spare",)

    def __init__(self, address: int, nbytes: int, owner: object, spare: int = 0) -> None:
        super().__init__(address, nbytes, owner)
        self._spare = spare

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        if address != self.address + start:  # else it was read in place
            memmove(self.address + start, address, len(view))

    def memory_for(self, start: int, length: int) -> Buffer | None:
        if start < -self._spare or start + length > self.nbytes + self._spare:
            return None
        return host_buffer(self.address + start, length)


class DeviceSink:
    """Bytes of a tensor on a device, given as one-dimensional uint8.

    Bytes in a buffer of the ring are still being copied when `deliver` returns, until the ring has
    settled.
    """

    __slots__ = ("_bytes", "_ring")

    def __init__(self, flat: torch.Tensor, ring: Ring | None = None) -> None:
        self._bytes = flat
        self._ring = ring

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._bytes.device

    def part(self, start: int, length: int) -> torch.Tensor:
        """Return the memory of some of the bytes."""
        return self._bytes[start : start + length]

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        import torch

        target = self._bytes[start : start + len(view)]
        if self._ring is not None and self._ring.holds(address, len(view)):
            self._ring.send(address, len(view), target)
            return
        target.copy_(torch.frombuffer(view, dtype=torch.uint8))
        if self._bytes.device.type == "cuda":
            # the buffer is used again, and the caller's stream is not this thread's
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def memory_for(self, start: int, length: int) -> Buffer | None:
        return None


class BytesSink(HostSink):
    """Keeps some bytes, in `data`."""

    __slots__ = ("_buffer", "data")

    def __init__(self, length: int) -> None:
        self._buffer = own_buffer(length)
        self.data = self._buffer.view
        super().__init__(self._buffer.address, length, self.data)

    def memory_for(self, start: int, length: int) -> Buffer | None:
        whole = length == self.nbytes
        return self._buffer if whole else super().memory_for(start, length)


class CheckedSink:
    """Passes the bytes of a record on, and adds their CRC-32 to a ledger.

    They begin at byte `first` of the record; if that is negative, with what lies before it. Without
    a sink only the ledger gets them.
    """

    __slots__ = ("_first", "_ledger", "_record", "_sink")

    def __init__(self, sink: Sink | None, ledger: CrcLedger, record: int, first: int = 0) -> None:
        self._sink = sink
        self._ledger = ledger
        self._record = record
        self._first = first

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        at = self._first + start
        own = view[-at:] if at < 0 else view
        if len(own):
            self._ledger.add(self._record, max(0, at), len(own), crc32(own))
        if self._sink is not None:
            self._sink.deliver(view, address, start)

    def memory_for(self, start: int, length: int) -> Buffer | None:
        return None if self._sink is None else self._sink.memory_for(start, length)


def storage_sink(storage: torch.UntypedStorage, ring: Ring | None = None) -> Sink:
    """Return the sink that fills a storage, on the host or on a device (through the ring)."""
    if is_on_host(storage):
        return HostSink(storage.data_ptr(), storage.nbytes(), storage)
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return DeviceSink(flat, ring)
