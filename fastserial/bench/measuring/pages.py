"""Page sizes of I/O buffers, which decide how large the device's requests are.

fastserial asks for huge pages, fio does not: where direct I/O is bound by requests, that alone
makes a difference of two. So like is compared with like: fio gets huge pages where some are
reserved, and else there is a row of fastserial without.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

from fastserial.files.meminfo import meminfo
from fastserial.memory.huge_pages import PR_GET_THP_DISABLE

__all__ = ["reserved_huge_bytes", "small_pages"]

_PR_SET_THP_DISABLE = 41
_POOLS = Path("/sys/kernel/mm/hugepages")


def reserved_huge_bytes() -> int:
    """Return the bytes of reserved huge pages that nobody uses (sysctl vm.nr_hugepages)."""
    size = meminfo().get("Hugepagesize", 0)
    try:
        free = (_POOLS / f"hugepages-{size // 1024}kB" / "free_hugepages").read_text()
    except OSError:
        return 0
    return int(free) * size


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """Let this process get no huge pages for the memory it first touches meanwhile.

    Raises:
        OSError: the kernel refuses.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0)
    if before < 0 or prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "huge pages cannot be switched off for this process")
    try:
        yield
    finally:
        prctl(_PR_SET_THP_DISABLE, before, 0, 0, 0)
