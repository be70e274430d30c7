"""Limits that the kernel sets a process, and what it takes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path


def status(name: str) -> int:
    """Return what /proc/self/status tells of memory, such as `VmRSS` (bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def peak(call: Callable[[], object]) -> int:
    """Return how many bytes more a call took, at most, than there were in use before."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    call()
    return status("VmHWM") - before


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `nbytes`: as a full disk, in the middle of a save."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
