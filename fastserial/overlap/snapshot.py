"""The storages of one save: what is copied at the call, and what is read later, where it is.

What is read later must not change until its bytes are taken. Whoever is about to change it asks
(`release`): what is left is copied, as far as the budget goes, and the rest waited for. What
changes without asking is noticed by torch's version counters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import compress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fastserial.config.performance import PACKED_STORAGE
from fastserial.errors import StorageChangedError, TornSnapshotError
from fastserial.memory.batch import Batch, batch_of
from fastserial.memory.storages import (
    HostMemory,
    Memory,
    StorageMemory,
    StorageOnHost,
    storage_memory,
)
from fastserial.overlap.staging import Region, staging
from fastserial.overlap.threads_at import at_rest, wait_until_on
from fastserial.overlap.watch import Reached

if TYPE_CHECKING:
    from torch import UntypedStorage

__all__ = ["LiveMemory", "Snapshot"]

_SMALL = PACKED_STORAGE  # a storage of up to so many bytes is copied at the call,
_SMALL_TOTAL = 32 * 1024 * 1024  # up to so many bytes of them, whatever the budget
_SHARED_COPY = 1024 * 1024  # bytes of a storage that torch's threads copy together
_ALIGNMENT = 64  # of copies (bytes)
_SLOWEST = 100e6  # bytes a second: a slower operation on a storage is not waited for
_PATIENCE = 1.0  # seconds


class LiveMemory:
    """A storage that is read later: where it is, or from a copy made meanwhile."""

    __slots__ = ("left", "live", "nbytes", "readers", "snapshot", "source")

    def __init__(self, snapshot: Snapshot, storage: UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.snapshot = snapshot
        self.source: Memory | None
        if storage.device.type == "cpu":
            self.source = StorageOnHost(storage, storage.data_ptr(), self.nbytes, True)
        else:
            self.source = storage_memory(storage)
        self.live = True  # `source` is what the program goes on to change
        self.left = 0  # bytes to read; counted from `Snapshot.begin` on
        self.readers = 0  # of the storage itself, now

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`.

        Raises:
            StorageChangedError: the storage was resized, or the snapshot is torn.
        """
        snapshot = self.snapshot
        with snapshot.lock:
            source, live = self.source, self.live
            if source is None or snapshot.torn:
                raise StorageChangedError
            self.readers += live
        try:
            source.copy_to(address, start, length)
        finally:
            with snapshot.lock:
                self.readers -= live
                self.left -= length
                snapshot.changed.notify_all()

    @property
    def wanted(self) -> bool:
        """Whether the storage must stay as it is."""
        return self.readers > 0 or (self.live and self.left > 0)


class Snapshot:
    """The bytes of one save.

    Attributes:
        path: of the file.
        reached: what was pickled.
        storages: identities of those that are read later.
        copied: bytes copied at the call.
        late_copied, held, waited: what `release` did (bytes, seconds).
        torn: something was changed before its bytes were taken.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        budget: int | None,
        reached: Reached,
        always: Set[int] = frozenset(),
    ) -> None:
        """Start an empty one.

        Args:
            path: of the file, for errors.
            kind: `copy` or `in_place`.
            budget: bytes of staging memory; None: half of what is available.
            reached: what was pickled.
            always: identities of storages to be copied at the call.
        """
        self.copied = 0
        self.late_copied = 0
        self.held = 0.0
        self.waited = False
        self.torn = False
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.path = path
        self._kind = kind
        self._budget = budget
        self.reached = reached
        self._always = always
        self._must_wait = kind == "copy"
        self._live: list[LiveMemory] = []
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._regions: list[Region] = []
        self._taken = threading.Event()
        self._releasing = threading.RLock()
        self._threads = {threading.get_ident()}
        self._longest = 0
        self.storages: Set[int] = frozenset()  # identities of those that are read later
        self.on_taken: Callable[[], object] | None = None

    # -- at the call ---------------------------------------------------------------------------

    def batch(self, storages: Sequence[UntypedStorage]) -> Batch:
        """Return the memory of storages, in the order of the file; some of it copied now."""
        copies = self._choose(storages)
        try:
            copied = self._copy(list(compress(storages, copies)))
        except OSError:  # no room for copies: all is written before the call returns
            self._must_wait = True
            copies = [not storage.nbytes() for storage in storages]
            copied = self._copy(list(compress(storages, copies)))
        later = [storage for storage, copy in zip(storages, copies, strict=True) if not copy]
        self._longest = max((storage.nbytes() for storage in later), default=0)
        self.storages = {storage._cdata for storage in later}
        made = iter(copied)
        memories: list[Memory] = []
        for storage, copy in zip(storages, copies, strict=True):
            if copy:
                memories.append(next(made))
            else:
                live = LiveMemory(self, storage)
                self._live.append(live)
                memories.append(live)
        return batch_of(memories)

    def begin(self) -> None:
        """Start counting what is read: the layout, which looks at the first bytes, is made."""
        for memory in self._live:
            memory.left = memory.nbytes
        if not self._live:
            self._set_taken()

    def _choose(self, storages: Sequence[UntypedStorage]) -> list[bool]:
        """Tell which storages are copied; note what is to be watched of the others."""
        in_place = self._kind == "in_place"
        sizes = [storage.nbytes() for storage in storages]
        versions: list[list[tuple[torch.Tensor, int]] | None] = [None] * len(storages)
        if in_place:
            versions = [
                None if storage._cdata in self._always else self.reached.versions(storage)
                for storage in storages
            ]
        watched = [found is not None for found in versions]
        copies = [not size for size in sizes]  # an empty one is no matter
        room = staging.room(sum(map(_padded, sizes)), self._budget)
        small = max(room, _SMALL_TOTAL)
        order = range(len(sizes) - 1, -1, -1)  # what is written last is copied first
        for index in sorted(order, key=lambda index: watched[index]):
            need = _padded(sizes[index])
            if in_place and watched[index]:
                if 0 < sizes[index] <= _SMALL and need <= small:
                    copies[index] = True
                    small -= need
                    room -= need
            elif sizes[index] and need <= room:
                copies[index] = True
                room -= need
                small -= need
        for index, found in enumerate(versions):
            if not copies[index]:
                self._must_wait |= found is None
                self._watched += found or ()
        return copies

    def _copy(self, storages: Sequence[UntypedStorage]) -> list[Memory]:
        nbytes = sum(_padded(storage.nbytes()) for storage in storages)
        if not nbytes:
            return [HostMemory(0, 0, None) for _ in storages]
        region = staging.take(nbytes)
        self._regions.append(region)
        made: list[Memory] = []
        address = region.address
        for storage in storages:
            size = storage.nbytes()
            if size:
                _copy_storage(storage, address, size)
            made.append(HostMemory(address, size, region))
            address += _padded(size)
            self.copied += size
        return made

    def wait_unwatched(self) -> None:
        """Return when all is taken whose changes nobody would notice, or that was to be copied."""
        if self._must_wait:
            self.wait()

    # -- until the bytes are taken -------------------------------------------------------------

    @property
    def taken(self) -> bool:
        """Whether the program may change everything."""
        return self._taken.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the program may change everything; False if it took too long (seconds)."""
        with at_rest():
            return self._taken.wait(timeout)

    def concerns(self, storages: Iterable[int]) -> bool:
        """Tell whether one of the storages, by identity, is read later."""
        return not self.storages.isdisjoint(storages)

    def release(self) -> None:
        """Return when the calling thread may change everything, after copying what is left."""
        began = perf_counter()
        with at_rest(), self._releasing:
            if self.taken:
                return
            self._threads.add(threading.get_ident())
            self._copy_rest()
            with self.lock:
                self.waited |= self._is_wanted()
                self.changed.wait_for(lambda: self.taken or self.torn or not self._is_wanted())
            self._conclude()
            self.held += perf_counter() - began

    def verify(self) -> None:
        """Make sure that what was read is what there was at the call.

        Raises:
            TornSnapshotError: it is not.
        """
        if not self.taken:
            if self._watched:
                wait_until_on(self._threads, max(_PATIENCE, self._longest / _SLOWEST))
            self._conclude()
        if self.torn:
            raise TornSnapshotError(self.path)

    def end(self) -> None:
        """The save is over, however it ended: nothing is needed any more."""
        self._set_taken()
        with self.lock:
            regions, self._regions = self._regions, []
        for region in regions:
            staging.give(region)

    def _is_wanted(self) -> bool:
        return any(memory.wanted for memory in self._live)

    def _conclude(self) -> None:
        """Compare the counters, unless that was done. Nothing that is wanted is left."""
        with self.lock:
            if self.taken:
                return
            self.torn |= self._has_changed()
            self._set_taken()

    def _has_changed(self) -> bool:
        return any(_version(tensor) != seen for tensor, seen in self._watched)

    def _set_taken(self) -> None:
        with self.lock:
            self._taken.set()
            self.changed.notify_all()
            self._watched = []
            self.reached.clear()
            for memory in self._live:
                if memory.live:
                    memory.source = None  # the program may free it
            self._live = []
            called, self.on_taken = self.on_taken, None
        if called is not None:
            called()

    def _copy_rest(self) -> None:
        """Copy what is not read yet, as far as the budget goes, from the end of the file on."""
        with self.lock:
            rest = [memory for memory in reversed(self._live) if memory.wanted and memory.live]
            most = sum(_padded(memory.nbytes) for memory in self._live)
        size = room = staging.room(most, self._budget)
        chosen = []
        for memory in rest:
            if (need := _padded(memory.nbytes)) <= room:
                chosen.append(memory)
                room -= need
        if not chosen:
            return
        try:
            region = staging.take(size)  # of the same size every time: it is used again
        except OSError:  # no room: it is waited for
            return
        self._regions.append(region)
        address = region.address
        for memory in chosen:
            if self.torn or self.taken:
                return
            self._move(memory, address, region)
            address += _padded(memory.nbytes)

    def _move(self, memory: LiveMemory, address: int, region: Region) -> None:
        with self.lock:
            source = memory.source
            if memory.left <= 0 or source is None:
                return
        try:
            _copy_source(source, address, memory.nbytes)
        except StorageChangedError:
            self.torn = True
            return
        with self.lock:
            memory.source = HostMemory(address, memory.nbytes, region)
            memory.live = False
            self.late_copied += memory.nbytes


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _version(tensor: Any) -> int | None:
    try:
        version: int = tensor._version
    except RuntimeError:  # it has become one without
        return None
    return version


def _copy_source(source: Memory, address: int, nbytes: int) -> None:
    if isinstance(source, StorageOnHost):
        source.check()
        _copy_storage(source.storage, address, nbytes)
        source.check()
    else:
        source.copy_to(address, 0, nbytes)


def _copy_storage(storage: UntypedStorage, address: int, nbytes: int) -> None:
    """Copy a storage to host memory; a large one with torch's threads."""
    memory: Memory
    if storage.device.type != "cpu" or nbytes >= _SHARED_COPY:
        memory = StorageMemory(storage)
    else:
        memory = HostMemory(storage.data_ptr(), nbytes, storage)
    memory.copy_to(address, 0, nbytes)
