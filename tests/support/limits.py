"""Limits that the kernel sets a process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

__all__ = ["file_size_limit"]


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `nbytes`: as a full disk, in the middle of a save."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
