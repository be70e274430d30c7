"""Many storages as columns: a checkpoint may hold a million, and an object for each takes time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from fastserial.config.performance import PACKED_BYTES, PACKED_STORAGE
from fastserial.errors import StorageChangedError
from fastserial.memory.storages import (
    HostMemory,
    Memory,
    StorageMemory,
    StorageOnHost,
    bytes_at,
    device_types,
    host_bytes,
    is_on_host,
    other_threads,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "batch_of", "storage_batch"]

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
        sizes = self.sizes[begin:end]
        if self.storages is None:
            return list(map(bytes_at, self.addresses[begin:end], sizes))
        some = self.storages[begin:end]
        # without a step of Python's between the look at a storage and its copy: no other thread
        # gets the interpreter there, to resize it
        texts = list(map(bytes_at, map(self._address, some), map(self._size, some)))
        if list(map(len, texts)) != list(sizes):
            raise StorageChangedError
        return texts

    @property
    def _address(self) -> Callable[[torch.UntypedStorage], int]:
        from torch import UntypedStorage

        return UntypedStorage.data_ptr

    @property
    def _size(self) -> Callable[[torch.UntypedStorage], int]:
        from torch import UntypedStorage

        return UntypedStorage.nbytes

    def pieces(self) -> Iterator[tuple[int, int, bool]]:
        """Cut the batch up: (first, one past the last, whether to pack them) of each piece.

        Small host storages come packed, some `PACKED_BYTES` in a piece; any other one alone.
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
        marks = self._heads(readable, len(mark))
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

    def _heads(self, indices: Sequence[int], length: int) -> list[bytes]:
        lengths = repeat(length)
        if self.storages is None:
            return list(map(bytes_at, map(self.addresses.__getitem__, indices), lengths))
        some = list(map(self.storages.__getitem__, indices))
        there = map(min, map(self._size, some), lengths)  # as in `texts`
        return list(map(bytes_at, map(self._address, some), there))


def storage_batch(storages: Sequence[torch.UntypedStorage]) -> Batch:
    """Return the memory of many storages, which it keeps alive."""
    from torch import UntypedStorage

    sizes = list(map(UntypedStorage.nbytes, storages))
    if device_types(storages) <= {"cpu"}:
        addresses = list(map(UntypedStorage.data_ptr, storages))
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
