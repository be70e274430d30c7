"""A save on a host of its own: `host.py PATH BYTE NUMBER_OF_BYTES GUARD`.

A line on standard input lets it take each step, and it prints one after each: opened, half written,
saved. The host's name is that of `/proc/sys/kernel/random/boot_id`, as in any process. Without the
guard temporary names are numbered, locks are trusted and names are not checked.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress

import fastserial
from fastserial.files import destination


def _sweep(directory: int) -> None:
    """Remove what has no lock."""
    with suppress(OSError):
        fd = os.open(_NAME, os.O_RDWR, dir_fd=directory)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(_NAME, dir_fd=directory)


def _step(text: str) -> None:
    print(text, flush=True)
    sys.stdin.readline()


path, byte, nbytes, guard = sys.argv[1:]
_NAME = f".{os.path.basename(path)}.fastserial-0.tmp"
if guard == "off":
    real = destination.temporary_name
    destination.temporary_name = lambda name: _NAME if name in path else real(name)
    destination.sweep = _sweep
    destination.Replacement._checked_name = lambda self: str(self.named)  # type: ignore[method-assign]
half = bytes([int(byte)]) * (int(nbytes) // 2)
with fastserial.FastFileWriter(path) as file:
    _step("opened")
    file.write(half)
    file.flush()
    _step("half written")
    file.write(half)
print("saved", file.report, flush=True)
