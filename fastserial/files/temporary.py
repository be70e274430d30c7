"""Temporary names, and what killed processes left under them.

A temporary name is random, and says which process made it: the boot of its machine, its PID
namespace, its number in there and when it started. So nobody takes it for another save's, and a
process of the same namespace can tell whether its owner still runs. The owner also holds a lock
(`flock`) on the file, which the kernel releases at its end. Both are needed: locks may be local to
a host (NFS with `nolock`, Lustre with `localflock`, most FUSE), and processes of another container
cannot be seen. `sweep` removes a file

- whose owner ran in our namespace and does not exist any more (if it is still locked, on a network
  file system, after a day: a server that did not hear of the unlock keeps the lock);
- on a file system of one host, where locks are known to work, also one that nobody has locked, if
  its owner is of this boot (another container) or it is older than this boot (a power cut);
- elsewhere, and if the owner is of another boot, one that was not written for a day.

Nothing here is proof that a live file is never removed (clocks may be wrong, a virtual machine may
be a copy of another one). `Replacement.commit` checks what its name leads to before it renames it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import stat
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from fastserial.files import linux
from fastserial.interrupts import Descriptors, ours, suppress

_BASE_NBYTES = 60  # of the target's name: no file system finds the whole too long (eCryptfs: 143)
_MARK = ".fastserial-"
_NAME = re.compile(
    r"\.(?P<base>.*)\.fastserial-(?P<boot>[0-9a-f]{12})-(?P<space>[0-9a-f]{8})"
    r"-(?P<process>\d{1,10})-(?P<started>\d{1,20})-[0-9a-f]{16}\.tmp",
    re.DOTALL,
)
_UNKNOWN = "0" * 12
_DAY = 86400.0  # seconds
# A folder is searched again after so many times the time that it took: 1 % of the time at most.
_PAUSE = 100
_MOST_FOLDERS = 1000
_due: dict[tuple[int, int], float] = {}  # by device and inode, when a folder is searched again


class Owner(NamedTuple):
    """The process that made a temporary file.

    Attributes:
        boot: of its machine, a digest; zeros if that is unknown.
        space: its PID namespace, a digest.
        process: its number there.
        started: when (clock ticks after the boot).
    """

    boot: str
    space: str
    process: int
    started: int


@functools.cache
def this_process() -> Owner:
    """Return who we are in temporary names."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = blake2b(file.read(), digest_size=6).hexdigest()
        # clock ticks are counted from the boot as the time namespace has it
        spaces = [os.readlink("/proc/self/ns/pid")]
        with suppress(FileNotFoundError):
            spaces.append(os.readlink("/proc/self/ns/time"))
        space = blake2b(" ".join(spaces).encode(), digest_size=4).hexdigest()
        started = _Status("self").started
    except ours(OSError):  # no /proc
        return Owner(_UNKNOWN, _UNKNOWN[:8], os.getpid(), 0)
    return Owner(boot, space, os.getpid(), started)


def temporary_name(name: str) -> str:
    """Return a new temporary name for the file `name` (without its directory)."""
    encoded = os.fsencode(name)
    if len(encoded) > _BASE_NBYTES:
        end = _BASE_NBYTES
        while end > _BASE_NBYTES - 3 and encoded[end] & 0xC0 == 0x80:  # inside of a character
            end -= 1
        name = os.fsdecode(encoded[:end])
    boot, space, process, started = this_process()
    return f".{name}{_MARK}{boot}-{space}-{process}-{started}-{os.urandom(8).hex()}.tmp"


def owner_of(name: str) -> Owner | None:
    """Return the process that made a temporary file, None if it is not the name of one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Owner(match["boot"], match["space"], int(match["process"]), int(match["started"]))


def sweep(directory: int) -> None:
    """Remove what killed processes left in a folder, of any target; not at each call.

    Args:
        directory: descriptor of the folder.
    """
    found = os.fstat(directory)
    key = found.st_dev, found.st_ino
    began = time.perf_counter()
    if began < _due.get(key, 0.0):
        return
    for name in leftovers(directory):
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
    if len(_due) >= _MOST_FOLDERS:
        _due.clear()
    ended = time.perf_counter()
    _due[key] = ended + (ended - began) * _PAUSE


def search_again(directory: int) -> None:
    """Let the next `sweep` of a folder search it: something could not be removed."""
    with suppress(OSError):
        found = os.fstat(directory)
        _due.pop((found.st_dev, found.st_ino), None)


def leftovers(directory: int) -> list[str]:
    """Return the names of what killed processes left in a folder.

    Args:
        directory: descriptor of the folder.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if _MARK in entry.name]
    except ours(OSError):
        return []
    if not names:
        return []
    one_host = linux.magic_of(directory) in linux.LOCAL
    now_there = functools.cache(functools.partial(_now_there, directory))
    return [
        name
        for name in names
        if (owner := owner_of(name)) and _is_left(name, owner, directory, one_host, now_there)
    ]


def _is_left(
    name: str, owner: Owner, directory: int, one_host: bool, now_there: Callable[[], float]
) -> bool:
    """Return whether a file is one that nobody writes any more."""
    own = this_process()
    known = own.boot != _UNKNOWN
    is_ours = known and owner == own  # it could not be removed when its save had failed
    is_neighbour = known and (owner.boot, owner.space) == (own.boot, own.space)
    if is_neighbour and not is_ours and not _has_ended(owner):
        return False
    try:
        status = os.lstat(name, dir_fd=directory)
    except ours(OSError):  # removed meanwhile
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    written = status.st_mtime
    if is_ours:
        return _is_locked(name, directory) is False
    if is_neighbour and _is_locked(name, directory) is not True:
        return True
    if one_host and ((known and owner.boot == own.boot) or written < _booted()):
        return _is_locked(name, directory) is False
    now = time.time()
    if written > now - _DAY or (not is_neighbour and _is_locked(name, directory) is True):
        return False
    return written <= now_there() - _DAY


def _has_ended(owner: Owner) -> bool:
    """Return whether a process of our namespace does not exist any more."""
    if owner.process < 1:
        return False
    try:
        os.kill(owner.process, 0)  # sees also what /proc hides
    except ours(ProcessLookupError, OverflowError):
        return True
    except ours(OSError):  # another user's
        pass
    if not _proc_is_ours():
        return False
    try:
        found = _Status(owner.process)
    except ours(OSError):  # hidden, or it ended now
        return False
    return found.started != owner.started or found.is_zombie


class _Status:
    """What /proc says of a process.

    Attributes:
        started: when (clock ticks after the boot).
        is_zombie: it has ended, and its parent has not asked yet.
    """

    def __init__(self, process: int | str) -> None:
        """Read it.

        Raises:
            OSError: there is no such process, or it is hidden.
        """
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # after the name: any text
        self.started = int(fields[19])
        # a first thread may end before the others
        self.is_zombie = fields[0] in b"ZX" and int(fields[17]) < 2


@functools.cache
def _proc_is_ours() -> bool:
    """Return whether /proc shows our PID namespace, not one around it."""
    with suppress(OSError), open("/proc/self/status", "rb") as lines:
        for line in lines:
            if line.startswith(b"NSpid:"):
                return len(line.split()) == 2
    return False


for _cached in (this_process, _proc_is_ours):
    os.register_at_fork(after_in_child=_cached.cache_clear)


def _booted() -> float:
    """Return when this machine was started (seconds since the epoch)."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _now_there(directory: int) -> float:
    """Return the time by which the file system of a folder dates files: that of its server.

    0 if no file can be made.
    """
    name = temporary_name("time")
    try:
        with Descriptors() as files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            return os.fstat(files.open(name, flags, 0o600, directory)).st_mtime
    except ours(OSError):
        return 0.0
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _is_locked(name: str, directory: int) -> bool | None:
    """Return whether a process has locked a file, None if that cannot be found out."""
    try:
        with Descriptors() as files:
            # Over NFS an exclusive lock takes a descriptor that can write.
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
            fcntl.flock(files.open(name, flags, dir_fd=directory), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ours(BlockingIOError):
        return True
    except ours(OSError):
        return None
    return False
