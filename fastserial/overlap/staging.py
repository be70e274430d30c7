"""Memory for copies of storages: kept between saves; the kernel may take its pages meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from math import inf
from typing import Any

import torch

from fastserial.files.linux import available_bytes
from fastserial.interrupts import Locked, ours

_LARGER = 2  # a kept region is used for as few as one part in so many of its bytes,
_LITTLE = 1024 * 1024  # or up to so many more
_MORE = 8 * 1024 * 1024  # bytes kept beyond the most that was in use at a time
_SHARE = 2  # without a budget, copies take at most one part in so many of the memory that is free

# How many ranks a launcher started on this node: torchrun, Open MPI, MPICH and Intel MPI, Slurm.
_LAUNCHED = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
)

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostRegion:
    """Anonymous memory at `address`, mapped as long as this object lives."""

    __slots__ = ("__weakref__", "_anchor", "_map", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        """Map at least `nbytes` bytes.

        Raises:
            OSError: there is no room for them (`ulimit -v`).
        """
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self._advise(mmap.MADV_HUGEPAGE)

    def forget(self) -> None:
        """Let the kernel take the pages when it is short of memory."""
        self._advise(mmap.MADV_FREE)

    def __del__(self, advice: int = mmap.MADV_DONTNEED) -> None:
        if hasattr(self, "address"):
            self._advise(advice)  # `munmap` would hold the interpreter's lock

    def _advise(self, advice: int, madvise: Any = _madvise) -> None:
        """Advise the kernel; a failure costs time only.

        Millions of pages take their time, and `mmap.madvise` does not drop the interpreter's lock.
        Names of the module may be gone when the interpreter ends; defaults are not.
        """
        madvise(self.address, self.nbytes, advice)


class Staging:
    """The regions of a process: those in use, and those kept for the next save.

    Attributes:
        ranks_of_node: how many ranks of the job share this node's memory, once they were counted.
    """

    def __init__(self) -> None:
        self.ranks_of_node = 0
        self._lock = threading.RLock()
        self._free: list[HostRegion] = []
        # Not held here: a save that ends in an exception may not give its regions back.
        self._used: set[weakref.ref[HostRegion]] = set()
        self._most_in_use = 0

    @property
    def in_use(self) -> int:
        """Bytes taken and not given back."""
        used = [ref() for ref in list(self._used)]  # a signal handler may take one meanwhile
        return sum(region.nbytes for region in used if region is not None)

    @property
    def held(self) -> int:
        """Bytes mapped, whether in use or not."""
        return self.in_use + sum(region.nbytes for region in self._free)

    def take(self, nbytes: int, budget: int | None) -> HostRegion | None:
        """Return a region of at least `nbytes` bytes, a kept one if there is one large enough.

        Args:
            nbytes: how many.
            budget: of all regions in use (bytes); None: this rank's part of half of what is
                available on the node.

        Returns:
            The region; None if there is no room for it.
        """
        if nbytes > self._room(budget):
            return None
        with Locked(self._lock):
            most = nbytes * _LARGER + _LITTLE
            fitting = [region for region in self._free if nbytes <= region.nbytes <= most]
            if fitting:
                region = min(fitting, key=_size)
                self._free.remove(region)
            else:
                # Free kept ones, the largest first, beyond the most that was in use at a time.
                kept = max(self._most_in_use, self.in_use + nbytes) + _MORE
                self._free.sort(key=_size)
                while self._free and self.held + nbytes > kept:
                    self._free.pop()
                try:
                    region = HostRegion(nbytes)
                except ours(OSError):
                    return None
            for ref in [ref for ref in list(self._used) if ref() is None]:
                self._used.discard(ref)
            self._used.add(weakref.ref(region))
            self._most_in_use = max(self._most_in_use, self.in_use)
            return region

    def _room(self, budget: int | None) -> float:
        """Return how many bytes more may be taken."""
        if budget is not None:
            return budget - self.in_use
        available = available_bytes()
        return inf if available is None else available // (_SHARE * self._ranks_here())

    def _ranks_here(self) -> int:
        """Return how many ranks of the job share this node's memory; all if it is unknown."""
        if self.ranks_of_node:
            return self.ranks_of_node
        if launched := _launched_here():
            return launched
        used = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if used else 1

    def give(self, region: HostRegion) -> None:
        """Keep a region for the next save."""
        with Locked(self._lock):
            self._used.discard(weakref.ref(region))
            region.forget()
            self._free.append(region)

    def forget(self) -> None:
        """Start over in a forked child: the users of the regions do not exist there."""
        self._lock = threading.RLock()
        self._free.clear()
        self._used.clear()
        self._most_in_use = 0


def _launched_here() -> int:
    """Return how many ranks were launched on this node, as the launcher says; 0 if it does not."""
    for name in _LAUNCHED:
        # Slurm's is "2(x3),1": of a node that is not known, the most.
        counts = (text.partition("(")[0] for text in os.environ.get(name, "").split(","))
        if found := max((int(count) for count in counts if count.isdecimal()), default=0):
            return found
    return 0


def _size(region: HostRegion) -> int:
    return region.nbytes


staging = Staging()
os.register_at_fork(after_in_child=staging.forget)
