"""The bytes of one save, copied at the call: the program may change its tensors once it returns."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from fastserial.errors import StorageChangedError
from fastserial.memory.buffers import copy_to_host
from fastserial.memory.storages import (
    DeviceMemory,
    HostMemory,
    Memory,
    StorageMemory,
    is_on_host,
)
from fastserial.overlap.staging import HostRegion, staging
from fastserial.reports import SnapshotReport

if TYPE_CHECKING:
    from torch import UntypedStorage


_ALIGNMENT = 64  # of copies (bytes)


class StoragePart(NamedTuple):
    """Bytes that a save reads.

    Attributes:
        storage: whose bytes they are; or any memory.
        start, nbytes: which (bytes).
    """

    storage: UntypedStorage | Memory
    start: int
    nbytes: int

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
            memory = StorageMemory(storage)
        elif storage.nbytes() < start + nbytes:
            raise StorageChangedError
        else:  # torch's own threads would wait for a computing one: 0.9 s instead of 0.3
            memory = HostMemory(storage.data_ptr(), start + nbytes, storage)
        if isinstance(memory, DeviceMemory):
            copy_to_host(memory, address, start, nbytes)
        else:
            memory.copy_to(address, start, nbytes)


class Snapshot:
    """Copies of the bytes of one save, in memory that the next save uses again.

    Attributes:
        kind: `copy`; or `blocking`: nothing is copied, and the call returns when all is written.
    """

    def __init__(self, budget: int | None, began: float) -> None:
        """Create an empty snapshot.

        Args:
            budget: bytes of all copies of the process; None: half of what is available.
            began: when the user's call did (`perf_counter`).
        """
        self.kind = "copy"
        self._budget = budget
        self._began = began
        self._stall: float | None = None
        self._copied = 0
        self._region: HostRegion | None = None

    def take(self, parts: Sequence[StoragePart]) -> list[HostMemory] | None:
        """Return copies of the parts; None if they do not fit: then the save is `blocking`.

        Raises:
            StorageChangedError: a storage was resized meanwhile.
        """
        nbytes = sum(_padded(part.nbytes) for part in parts)
        if not nbytes:
            return [HostMemory(0, 0, None) for _ in parts]
        region = staging.take(nbytes, self._budget)
        if region is None:
            self.kind = "blocking"
            return None
        self._region = region
        copies: list[HostMemory] = []
        address = region.address
        for part in parts:
            if part.nbytes:
                part.copy_to(address)
            copies.append(HostMemory(address, part.nbytes, region))
            address += _padded(part.nbytes)
            self._copied += part.nbytes
        return copies

    def end_call(self) -> None:
        """Record how long the user's call took."""
        self._stall = perf_counter() - self._began

    def end(self) -> None:
        """Keep the memory for the next save: this one has ended, with or without an error."""
        region, self._region = self._region, None
        if region is not None:
            staging.give(region)

    def report(self) -> SnapshotReport:
        """Return what the report of the save says of this snapshot."""
        stall = perf_counter() - self._began if self._stall is None else self._stall
        return SnapshotReport(kind=self.kind, stall=stall, copied=self._copied, budget=self._budget)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
