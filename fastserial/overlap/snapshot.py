"""The storages of one save: some are copied at the call, the others are read in place later.

What is read later must not change until its bytes are taken. Before a change, `release` copies
what is left within the budget and waits for the rest. Other changes are detected by torch's version
counters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence, Set
from itertools import compress
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastserial.config.performance import PACKED_STORAGE
from fastserial.errors import StorageChangedError, TornSnapshotError
from fastserial.memory.buffers import copy_to_host
from fastserial.memory.storages import (
    Batch,
    HostMemory,
    Memory,
    StorageMemory,
    StorageOnHost,
    batch_of,
    is_on_host,
    storage_memory,
)
from fastserial.overlap.staging import HostRegion, staging
from fastserial.overlap.threads_at import at_rest, wait_until_on
from fastserial.overlap.watch import Reached
from fastserial.reports import SnapshotReport

if TYPE_CHECKING:
    from torch import UntypedStorage


_SMALL = PACKED_STORAGE  # a storage of up to so many bytes is copied at the call,
_SMALL_TOTAL = 32 * 1024 * 1024  # up to so many bytes of them, whatever the budget
_ALIGNMENT = 64  # of copies (bytes)
_PATIENCE = 1.0  # seconds: a thread that has not run for so long is in no operation


class StoragePart(NamedTuple):
    """Bytes that a save reads.

    Attributes:
        storage: whose bytes they are; or any memory, whose changes are not detected.
        start, nbytes: which (bytes).
    """

    storage: UntypedStorage | Memory
    start: int
    nbytes: int

    @property
    def memory(self) -> Memory:
        """The memory, to be read later from any thread."""
        storage = self.storage
        if not isinstance(storage, torch.UntypedStorage):
            return storage
        if is_on_host(storage):
            return StorageOnHost(storage, storage.data_ptr(), storage.nbytes(), True)
        return storage_memory(storage)

    def copy_to(self, address: int) -> None:
        """Copy them now.

        Raises:
            StorageChangedError: the storage was resized.
        """
        storage, start, nbytes = self
        memory: Memory
        if not isinstance(storage, torch.UntypedStorage):
            memory = storage
        elif not is_on_host(storage):
            copy_to_host(StorageMemory(storage), address, start, nbytes)
            return
        elif storage.nbytes() < start + nbytes:
            raise StorageChangedError
        else:  # torch's own threads would wait for a computing one: 0.9 s instead of 0.3
            memory = HostMemory(storage.data_ptr(), start + nbytes, storage)
        memory.copy_to(address, start, nbytes)


class LiveMemory:
    """Bytes that are read later: in place, or from a copy made meanwhile.

    Attributes:
        nbytes: how many.
        part: which.
        left: bytes to read; counted from `Snapshot.begin` on.
    """

    __slots__ = ("_live", "_readers", "_snapshot", "_source", "_start", "left", "nbytes", "part")

    def __init__(self, snapshot: Snapshot, part: StoragePart) -> None:
        self.part = part
        self.nbytes = part.nbytes
        self.left = 0
        self._snapshot = snapshot
        self._source: Memory | None = part.memory
        self._start = part.start  # in the source
        self._live = True  # the source is memory that the program may change
        self._readers = 0  # of it, now

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) of the part to host memory at `address`.

        Raises:
            StorageChangedError: the storage was resized, or the snapshot is torn.
        """
        snapshot = self._snapshot
        with snapshot.lock:
            source, live, first = self._source, self._live, self._start
            if source is None or snapshot.torn:
                raise StorageChangedError
            self._readers += live
        try:
            source.copy_to(address, first + start, length)
        finally:
            with snapshot.lock:
                self._readers -= live
                self.left -= length
                snapshot.changed.notify_all()

    @property
    def wanted(self) -> bool:
        """Whether the bytes must stay as they are."""
        return self._readers > 0 or self.unread

    @property
    def unread(self) -> bool:
        """Whether bytes are left that would be read where the program changes them."""
        return self._live and self.left > 0

    def move(self, address: int, region: HostRegion) -> bool:
        """Copy the bytes to a region and read them there from now on; False if all were read.

        Raises:
            StorageChangedError: the storage was resized.
        """
        with self._snapshot.lock:
            source = self._source
            if self.left <= 0 or source is None:
                return False
        if isinstance(source, StorageOnHost):
            source.check()
            self.part.copy_to(address)
            source.check()
        else:
            source.copy_to(address, self._start, self.nbytes)
        with self._snapshot.lock:
            self._source, self._start = HostMemory(address, self.nbytes, region), 0
            self._live = False
        return True

    def forget(self) -> None:
        """Drop the reference to the program's memory."""
        if self._live:
            self._source = None


class Snapshot:
    """The bytes of one save.

    Attributes:
        path: of the file.
        kind: `copy` or `in_place`; `blocking`: all is written before the call returns.
        stall: seconds that the call took, once it is over.
        reached: what was pickled.
        storages: identities of those that are read later.
        copied: bytes copied at the call.
        late_copied, held, waited: what `release` did (bytes, seconds).
        torn: memory was changed before its bytes were taken.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        budget: int | None,
        reached: Reached,
        steady: Set[int] | None,
        began: float,
    ) -> None:
        """Create an empty snapshot.

        Args:
            path: of the file, for errors.
            kind: `copy` or `in_place`.
            budget: bytes of staging memory; None: half of what is available.
            reached: what was pickled.
            steady: identities of storages that only optimizer steps change: all others are copied.
                None: those are read in place whose changes would be detected.
            began: when the user's call did (`perf_counter`).
        """
        self.copied = self.late_copied = 0
        self.held = 0.0
        self.waited = False
        self.torn = False
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.path = path
        self.kind = kind
        self.stall: float | None = None
        self._began = began
        self._budget = budget
        self.reached = reached
        self._steady = steady
        self._must_wait = kind == "copy"
        self._live: list[LiveMemory] = []
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._regions: list[HostRegion] = []
        self._taken = threading.Event()
        self._releasing = threading.RLock()
        self._copying, self._ended = 0, False  # calls that copy; whether the save is over
        self._threads = {threading.get_ident(): threading.get_native_id()}
        self.storages: Set[int] = frozenset()  # identities of those that are read later

    # -- at the call ---------------------------------------------------------------------------

    def batch(self, storages: Sequence[UntypedStorage]) -> Batch:
        """Return the memory of storages, in the order of the file; some of it copied now."""
        return batch_of(
            self.take([StoragePart(storage, 0, storage.nbytes()) for storage in storages])
        )

    def take(self, parts: Sequence[StoragePart]) -> list[Memory]:
        """Return memory that has the parts as they are now; some of them are copied.

        Args:
            parts: in the order in which they will be read; each is read once.
        """
        copies = self._choose(parts)
        try:
            copied = self._copy(list(compress(parts, copies)))
        except OSError:  # no room for copies: all is written before the call returns
            self._must_wait = True
            copies = [not part.nbytes for part in parts]
            copied = self._copy(list(compress(parts, copies)))
        made = iter(copied)
        memories: list[Memory] = []
        for part, copy in zip(parts, copies, strict=True):
            if copy:
                memories.append(next(made))
            else:
                live = LiveMemory(self, part)
                self._live.append(live)
                memories.append(live)
        later = [memory.part.storage for memory in self._live]
        self.storages = {one._cdata for one in later if isinstance(one, torch.UntypedStorage)}
        return memories

    @property
    def is_copied(self) -> bool:
        """Whether nothing is read where the program may change it."""
        return not self._live

    def begin(self) -> None:
        """Start counting what is read: the layout, which read the first bytes, is complete."""
        for memory in self._live:
            memory.left = memory.nbytes
        if not self._live:
            self._set_taken()

    def _choose(self, parts: Sequence[StoragePart]) -> list[bool]:
        """Return which parts are copied; watch the counters of the others."""
        versions: list[list[tuple[torch.Tensor, int]] | None] = [None] * len(parts)
        if self.kind == "in_place":
            versions = [self._watchable(part.storage) for part in parts]
        watched = [found is not None for found in versions]
        copies = [not part.nbytes for part in parts]
        room = staging.room(sum(_padded(part.nbytes) for part in parts), self._budget)
        small = max(room, _SMALL_TOTAL)
        order = range(len(parts) - 1, -1, -1)  # what is written last is copied first
        for index in sorted(order, key=lambda index: watched[index]):
            nbytes = parts[index].nbytes
            need = _padded(nbytes)
            fits = need <= room if not watched[index] else nbytes <= _SMALL and need <= small
            if nbytes and fits:
                copies[index] = True
                room -= need
                small -= need
        for index, found in enumerate(versions):
            if not copies[index]:
                self._must_wait |= found is None
                self._watched += found or ()
        return copies

    def _watchable(self, storage: object) -> list[tuple[torch.Tensor, int]] | None:
        """Return the tensors whose counters show changes of a storage; None: it must be copied."""
        if not isinstance(storage, torch.UntypedStorage):
            return None
        if self._steady is not None and storage._cdata not in self._steady:
            return None
        return self.reached.versions(storage)

    def _copy(self, parts: Sequence[StoragePart]) -> list[Memory]:
        nbytes = sum(_padded(part.nbytes) for part in parts)
        if not nbytes:
            return [HostMemory(0, 0, None) for _ in parts]
        region = staging.take(nbytes)
        self._regions.append(region)
        made: list[Memory] = []
        address = region.address
        for part in parts:
            if part.nbytes:
                part.copy_to(address)
            made.append(HostMemory(address, part.nbytes, region))
            address += _padded(part.nbytes)
            self.copied += part.nbytes
        return made

    def end_call(self) -> None:
        """Wait for what had to be copied, or is not watched: then the user's call may return."""
        if self._must_wait:
            self.wait()
        self.stall = perf_counter() - self._began

    def abandon(self) -> None:
        """Mark the snapshot as torn if `end_call` would wait: the call ends with an error."""
        with self.lock:
            self.torn |= self._must_wait and not self.taken

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
        """Return whether one of the storages, by identity, is read later."""
        return not self.storages.isdisjoint(storages)

    def release(self) -> None:
        """Copy what is left, and return when the calling thread may change everything."""
        began = perf_counter()
        with at_rest(), self._releasing:
            if self.taken:
                return
            self._threads[threading.get_ident()] = threading.get_native_id()
            self._copying += 1
            try:
                self._copy_rest()
            finally:
                self._copying -= 1
                self._give_back()
            with self.lock:
                self.waited |= self._is_wanted()
                self.changed.wait_for(lambda: self.taken or self.torn or not self._is_wanted())
            self._conclude()
            self.held += perf_counter() - began

    def verify(self) -> None:
        """Check that the bytes that were read are those of the call.

        Raises:
            TornSnapshotError: they are not.
        """
        if not self.taken:
            if self._watched:
                wait_until_on(self._threads, _PATIENCE)
            self._conclude()
        if self.torn:
            raise TornSnapshotError(self.path)

    def report(self) -> SnapshotReport:
        """Return what the report of the save says of this snapshot."""
        return SnapshotReport(
            kind=self.kind,
            stall=perf_counter() - self._began if self.stall is None else self.stall,
            copied=self.copied,
            budget=self._budget,
            late_copied=self.late_copied,
            held=self.held,
            waited=self.waited,
        )

    def end(self) -> None:
        """Release everything: the save has ended, with or without an error."""
        self._set_taken()
        self._ended = True
        self._give_back()

    def _give_back(self) -> None:
        """Give the copies' memory back, unless a thread is about to copy, which does it then."""
        with self.lock:
            if self._copying or not self._ended:
                return
            regions, self._regions = self._regions, []
        for region in regions:
            staging.give(region)

    def _is_wanted(self) -> bool:
        return any(memory.wanted for memory in self._live)

    def _conclude(self) -> None:
        """Compare the counters once all wanted bytes are read; only the first call does."""
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
                memory.forget()
            self._live = []

    def _copy_rest(self) -> None:
        """Copy what is not read yet within the budget, from the end of the file backwards."""
        with self.lock:
            rest = [memory for memory in reversed(self._live) if memory.unread]
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
        except OSError:  # no room: the caller waits
            return
        self._regions.append(region)
        address = region.address
        for memory in chosen:
            if self.torn or self.taken:
                return
            try:
                if memory.move(address, region):
                    self.late_copied += memory.nbytes
            except StorageChangedError:
                self.torn = True
                return
            address += _padded(memory.nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _version(tensor: Any) -> int | None:
    try:
        version: int = tensor._version
    except RuntimeError:  # it has become an inference tensor
        return None
    return version
