"""The memory of storages, on the host or a device: one by one, or many as columns (`Batch`).

A checkpoint may hold a million storages; an object for each would take too long.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastserial.config.performance import PACKED_BYTES, PACKED_STORAGE
from fastserial.errors import StorageChangedError
from fastserial.memory.devices import has_streams

if TYPE_CHECKING:
    import torch


# Up to so many bytes a copy is faster than acquiring the interpreter's lock again. A thread that
# waits for the lock wakes up in vain each time that it is released so briefly.
_SMALL = 64 * 1024
_memmove_locked = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(("memmove", ctypes.CDLL(None)))
# `bytes_at(address, length)`, a copy, keeps the interpreter's lock.
bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_size_t, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def memmove(target: int, source: int | bytes, nbytes: int) -> None:
    """Copy memory between addresses; without the interpreter's lock if it is much."""
    (_memmove_locked if nbytes <= _SMALL else ctypes.memmove)(target, source, nbytes)


class HostMemory:
    """Host bytes at an address; `owner` keeps them alive."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        memmove(address, self.address + start, length)


class StorageOnHost(HostMemory):
    """Bytes of a host storage, which another thread may resize while they are copied.

    A resize frees the memory at once; no reference keeps it. So after every copy, address and size
    of the storage are compared with those before it. `shared`: other threads run and may resize it
    during a copy; then the kernel copies, which reports freed memory as an error where `memmove`
    would crash the process. That costs some CPU time if the pages are small.
    """

    __slots__ = ("shared", "storage")

    def __init__(
        self, storage: torch.UntypedStorage, address: int, nbytes: int, shared: bool
    ) -> None:
        super().__init__(address, nbytes, storage)
        self.storage = storage
        self.shared = shared

    def check(self) -> None:
        """Raise an error if the storage has changed.

        Raises:
            StorageChangedError: it was resized.
        """
        if self.storage.data_ptr() != self.address or self.storage.nbytes() != self.nbytes:
            raise StorageChangedError

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`.

        Raises:
            StorageChangedError: the storage was resized.
        """
        storage, source, nbytes = self.storage, self.address, self.nbytes
        if not self.shared or not copied_by_kernel(address, source + start, length):
            # As `check`, in half the time: this is done for each chunk.
            if storage.data_ptr() != source or storage.nbytes() != nbytes:
                raise StorageChangedError
            memmove(address, source + start, length)
        if storage.data_ptr() != source or storage.nbytes() != nbytes:
            raise StorageChangedError


class _IoVector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_read_process = getattr(ctypes.CDLL(None), "process_vm_readv", None)
if _read_process is not None:
    _read_process.restype = ctypes.c_ssize_t
    _read_process.argtypes = (
        ctypes.c_int,
        *(ctypes.POINTER(_IoVector), ctypes.c_ulong) * 2,
        ctypes.c_ulong,
    )


def copied_by_kernel(target: int, source: int, length: int) -> bool:
    """Copy host memory; False if there is none at `source`, or the kernel may not copy here."""
    if _read_process is None:
        return False
    to, of = _IoVector(target, length), _IoVector(source, length)
    moved: int = _read_process(os.getpid(), to, 1, of, 1, 0)
    return moved == length


def other_threads() -> bool:
    """Return whether Python has more threads than the main one. Takes no lock."""
    return _thread._count() > _inherited


_inherited = 0  # threads of the parent, which Python still counts in a forked child


def _count_inherited() -> None:
    global _inherited
    _inherited = _thread._count()


os.register_at_fork(after_in_child=_count_inherited)


class DeviceMemory:
    """Bytes on a device, copied to the host in the chunks that are asked for."""

    __slots__ = ()
    device: torch.device
    nbytes: int

    def check(self) -> None:
        """Raise an error if the memory has changed.

        Raises:
            StorageChangedError: its storage was resized.
        """

    def views(self, start: int, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what makes up bytes [start, start + length): the first byte of each, and a view.

        A view is on the device, of any strides; its elements follow each other as it shows them.
        """
        raise NotImplementedError

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`; returns when done.

        Raises:
            StorageChangedError: the storage was resized.
        """
        raise NotImplementedError


class StorageMemory(DeviceMemory):
    """Bytes of a storage on a device, from its byte `first` on, which may lie before it."""

    __slots__ = ("_first", "_whole", "device", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, first: int = 0) -> None:
        import torch

        self.nbytes = storage.nbytes() - first
        self.device = storage.device
        self._first = first
        self._whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def check(self) -> None:
        """Raise an error if the storage has changed.

        Raises:
            StorageChangedError: it was resized.
        """
        if self._whole.untyped_storage().nbytes() != self.nbytes + self._first:
            raise StorageChangedError

    def view(self, start: int, length: int) -> torch.Tensor:
        """Return bytes [start, start + length), as one-dimensional uint8."""
        first = self._first + start
        return self._whole[first : first + length]

    def views(self, start: int, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.view(start, length)

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`; returns when done.

        Raises:
            StorageChangedError: the storage was resized.
        """
        import torch

        self.check()
        target = (ctypes.c_char * length).from_address(address)
        host = torch.frombuffer(target, dtype=torch.uint8)
        host.copy_(self.view(start, length))


def host_bytes(memory: Memory, length: int) -> bytes:
    """Return the first bytes of a memory, wherever it is."""
    buffer = ctypes.create_string_buffer(length)
    memory.copy_to(ctypes.addressof(buffer), 0, length)
    return buffer.raw


def device_types(storages: Iterable[torch.UntypedStorage]) -> set[str]:
    """Return the types of the devices that storages are on."""
    return {device.type for device in set(map(attrgetter("device"), storages))}


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """Return whether the bytes of a storage are in the host's memory."""
    return storage.device.type == "cpu"


def all_on_host(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Return whether the bytes of all storages are in the host's memory."""
    return device_types(storages) <= {"cpu"}


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are the elements of its own storage, and nothing else."""
    import torch

    plain: Any = torch._C._disabled_torch_dispatch_impl  # all others are overridden in Python
    return (
        type(tensor).__torch_dispatch__ is plain
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def storage_memory(storage: torch.UntypedStorage) -> StorageOnHost | StorageMemory:
    """Return the memory of a storage on the host or a device."""
    if is_on_host(storage):
        return StorageOnHost(storage, storage.data_ptr(), storage.nbytes(), other_threads())
    return StorageMemory(storage)


def synchronize(storages: Sequence[torch.UntypedStorage]) -> None:
    """Wait for the work queued on the current streams of the storages' devices.

    The copies to the host run in other threads, hence on other streams than the caller's.
    """
    import torch

    for device in set(map(attrgetter("device"), storages)):
        if device.type != "cpu" and has_streams(device):
            getattr(torch, device.type).current_stream(device).synchronize()


class Memory(Protocol):
    """Bytes of a storage, wherever they are."""

    nbytes: int

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy `length` bytes from byte `start` of the storage to host memory at `address`."""


def new_storage(nbytes: int) -> torch.UntypedStorage:
    """Return new host memory, whatever the default device."""
    import torch

    make: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = make(nbytes, device="cpu")
    return storage


_OfStorage = Callable[["torch.UntypedStorage"], int]
_AROUND = 128  # about how many container bytes come with a storage


class Batch(NamedTuple):
    """Storages in the order of the file.

    Attributes:
        addresses: of their bytes in host memory, 0 where they are not there or empty.
        sizes: bytes of each.
        memory: the memory of the storage at an index; the addresses are valid as long as this is
            kept.
        storages: the storages, if there are any: another thread may resize them.
    """

    addresses: Sequence[int]
    sizes: Sequence[int]
    memory: Callable[[int], Memory]
    storages: Sequence[torch.UntypedStorage] | None = None

    def texts(self, begin: int, end: int) -> list[bytes]:
        """Copy the host memory of [begin, end).

        Raises:
            StorageChangedError: a storage was resized since the batch was made.
        """
        texts = self._copies(range(begin, end))
        if list(map(len, texts)) != list(self.sizes[begin:end]):
            raise StorageChangedError
        return texts

    def _copies(self, indices: Iterable[int], most: int | None = None) -> list[bytes]:
        """Return the bytes that host storages have now, of each the first `most`."""
        if self.storages is None:
            indices = list(indices)
            addresses = map(self.addresses.__getitem__, indices)
            sizes = map(self.sizes.__getitem__, indices)
        else:
            some = list(map(self.storages.__getitem__, indices))
            # no Python bytecode runs between reading a storage's address and copying it, so no
            # other thread can resize it there
            address, size = _untyped_storage()
            addresses, sizes = map(address, some), map(size, some)
        if most is not None:
            sizes = map(min, sizes, repeat(most))
        return list(map(bytes_at, addresses, sizes))

    def pieces(self) -> Iterator[tuple[int, int, bool]]:
        """Cut the batch up: (first, one past the last, whether to pack them) of each piece.

        Small host storages are packed, about `PACKED_BYTES` in a piece; any other one is alone.
        """
        columns = enumerate(zip(self.addresses, self.sizes, strict=True))
        alone = [
            index
            for index, (address, size) in columns
            if not address or not 0 < size <= PACKED_STORAGE
        ]
        count = len(self.sizes)
        ends = list(accumulate(map(add, self.sizes, repeat(_AROUND))))
        first = 0
        for index in (*alone, count):
            while first < index:
                before = ends[first - 1] if first else 0
                stop = min(bisect_left(ends, before + PACKED_BYTES) + 1, index)
                yield first, stop, True
                first = stop
            if index < count:
                yield index, index + 1, False
                first = index + 1

    def beginning_with(self, mark: bytes, length: int) -> dict[int, bytes]:
        """Return the first `length` bytes of the storages that begin with `mark`, by index.

        Those of fewer than `length` bytes do not count.

        Raises:
            StorageChangedError: a storage was resized since the batch was made.
        """
        columns = enumerate(zip(self.addresses, self.sizes, strict=True))
        readable = [index for index, (address, size) in columns if address and size >= length]
        marks = self._copies(readable, len(mark))
        found: dict[int, bytes] = {}
        if mark in marks:
            for index, text in zip(readable, marks, strict=True):
                if text == mark:
                    found[index] = host_bytes(self.memory(index), length)
        if 0 in self.addresses:
            for index, size in enumerate(self.sizes):
                if size >= length and not self.addresses[index]:
                    head = host_bytes(self.memory(index), length)
                    if head.startswith(mark):
                        found[index] = head
        return found


@functools.cache
def _untyped_storage() -> tuple[_OfStorage, _OfStorage]:
    """Return the methods of C that give the address and the size of a storage."""
    from torch import UntypedStorage

    return UntypedStorage.data_ptr, UntypedStorage.nbytes


def storage_batch(storages: Sequence[torch.UntypedStorage]) -> Batch:
    """Return the memory of many storages, which it keeps alive."""
    address, size_of = _untyped_storage()
    sizes = list(map(size_of, storages))
    if all_on_host(storages):
        addresses = list(map(address, storages))
    else:
        addresses = [s.data_ptr() if is_on_host(s) else 0 for s in storages]
    shared = other_threads()

    def memory(index: int) -> Memory:
        storage, size = storages[index], sizes[index]
        if is_on_host(storage):
            return StorageOnHost(storage, addresses[index], size, shared)
        found = StorageMemory(storage)
        if found.nbytes != size:
            raise StorageChangedError
        return found

    return Batch(addresses, sizes, memory, storages)


def batch_of(memories: Sequence[Memory]) -> Batch:
    """Return memories of any kind as a batch."""
    addresses = [
        memory.address if isinstance(memory, HostMemory) and memory.nbytes else 0
        for memory in memories
    ]
    return Batch(addresses, [memory.nbytes for memory in memories], memories.__getitem__)
