"""What Linux knows of files, devices and memory, and calls that Python has no function for.

Facts used: `statx(STATX_DIOALIGN)` (Linux 6.1) gives the alignment that direct I/O needs.
`fallocate(2)` fails where the file system cannot reserve space, unlike `posix_fallocate`, which
then writes zeros to every block. btrfs compresses neither what is written directly nor what was
reserved before, and reserves the full size; ZFS and bcachefs compress by settings that no mount
option need show.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastserial import trace
from fastserial.config import Config
from fastserial.config.performance import PAGE
from fastserial.interrupts import Descriptors
from fastserial.reasons import SEE_DOCTOR, Reason

PROC = 0x9FA0  # `magic_of` of procfs
# ext4, XFS, btrfs, F2FS, tmpfs, ZFS, bcachefs
LOCAL = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x2FC12FC1, 0xCA451A4E}

NO_PROC = Reason(
    "/proc is not mounted, and a file cannot be opened anew for direct I/O", "mount /proc"
)
_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_ATTR_COMPRESSED = 0x4
_STATX_ATTR_APPEND = 0x20
_STATX_ATTR_MOUNT_ROOT = 0x2000
_STATX_DIOALIGN = 0x2000
_STATX_MNT_ID = 0x1000  # since Linux 5.8,
_STATX_MNT_ID_UNIQUE = 0x4000  # never used again: since 6.8
_STATX_BYTES = 256
_ATTRIBUTES = struct.Struct("<8xQ40xQ")  # the attributes, and which of them are known
_MASK, _MOUNT, _ALIGNMENTS = struct.Struct("=I"), struct.Struct("=144xQ"), struct.Struct("=152xII")
_StatFs = ctypes.c_long * 32  # more than any machine's `struct statfs`, which begins with the type
# EPERM: of a container's filter of system calls
_NOT_RESERVED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV, errno.EPERM, errno.EINTR)
_LOCK = struct.Struct("@hhqqi4x")  # `struct flock`: type, whence, start, length, process

_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)
_statfs = _libc.statfs
_statfs.argtypes = (ctypes.c_char_p, _StatFs)


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What direct I/O on a file needs (bytes), `kernel_reported` or assumed."""

    memory: int
    offset: int
    kernel_reported: bool


def _statx_of(fd: int, path: bytes, flags: int, mask: int) -> ctypes.Array[ctypes.c_char] | None:
    """Return the result of `statx` (`struct statx`), None if it fails or is missing."""
    if _statx is None:
        return None
    buffer = (ctypes.c_char * _STATX_BYTES)()
    return buffer if _statx(fd, path, flags, mask, buffer) == 0 else None


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Return the alignment direct I/O needs on an open file; None: there is no direct I/O."""
    found = _statx_of(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN)
    if found is not None and _MASK.unpack_from(found)[0] & _STATX_DIOALIGN:
        memory, offset = _ALIGNMENTS.unpack_from(found)
        return DirectAlignment(memory, offset, True) if offset else None
    return DirectAlignment(PAGE, PAGE, False)


def reopen(fd: int, flags: int, files: Descriptors) -> int:
    """Reopen the file behind a descriptor with other flags; `files` owns it.

    Raises:
        OSError: the file system does not take the flags, or /proc is not mounted.
    """
    return files.open(f"/proc/self/fd/{fd}", flags)


def magic_of(path: str) -> int:
    """Return the number of the file system's type (`f_type` of statfs) that holds `path`.

    0 if that is unknown.
    """
    words = _StatFs()
    return words[0] & 0xFFFFFFFF if _statfs(os.fsencode(path), words) == 0 else 0


def mount_of(path: str) -> int:
    """Return the number of the mount that holds `path`, 0 if the kernel does not report it."""
    found = _statx_of(_AT_FDCWD, os.fsencode(path), 0, _STATX_MNT_ID | _STATX_MNT_ID_UNIQUE)
    return int(_MOUNT.unpack_from(found)[0]) if found is not None else 0


def is_out_of_inodes(path: str) -> bool:
    """Return whether the file system can hold no more files, however small."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return False
    return stats.f_files > 0 and stats.f_favail == 0


def is_locked(fd: int) -> bool:
    """Return whether a process holds a POSIX lock (`fcntl.lockf`) on a file, this one included.

    A process loses its own as soon as it closes any descriptor of the file.
    """
    whole_file = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, whole_file)
    except OSError:  # a file system without locks
        return False
    return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


@trace.traced("preallocate")
def preallocate(fd: int, offset: int, length: int) -> bool:
    """Reserve space for `length` bytes at `offset`; the file grows to hold them.

    Returns False where the file system cannot, or where a signal came: some file systems start over
    after each.

    Raises:
        OSError: there is not enough space (ENOSPC, EDQUOT, EFBIG), or the disk failed.
    """
    call = _libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, 0, offset, length) == 0:
        return True
    number = ctypes.get_errno()
    if number not in _NOT_RESERVED:
        raise OSError(number, os.strerror(number))
    return False


def preadv(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Read into pieces from byte `offset` on, and return how many bytes were read.

    Raises:
        OSError: the disk failed.
    """
    try:
        return os.preadv(fd, pieces, offset)
    except PermissionError:  # Python calls preadv2, which a filter of system calls may refuse
        data = os.pread(fd, len(pieces[0]), offset)
        pieces[0][: len(data)] = data
        return len(data)


def synced(fd: int) -> bool:
    """Put an open file or directory on its device; False where the file system cannot.

    Raises:
        OSError: the device failed.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def free_bytes(file: int | str) -> int:
    """Return the bytes an unprivileged user can still write to the file system of a path or fd.

    Raises:
        OSError: it does not exist any more.
    """
    stats = os.statvfs(file)
    return stats.f_bavail * stats.f_frsize


def is_read_only(path: str) -> bool:
    """Return whether the file system that holds `path` is mounted read-only."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def is_append_only(fd: int) -> bool:
    """Return whether a file or directory may only grow (`chattr +a`)."""
    return bool(_has_attribute(_STATX_ATTR_APPEND, fd))


def _has_attribute(
    attribute: int, fd: int, path: str = "", flags: int = _AT_EMPTY_PATH
) -> bool | None:
    """Return whether a file has an attribute of `statx`, None if the kernel does not report it."""
    found = _statx_of(fd, os.fsencode(path), flags, 0)
    if found is None:
        return None
    attributes, known = _ATTRIBUTES.unpack_from(found)
    return bool(attributes & attribute) if known & attribute else None


def is_mount_point(path: str, parent_device: int) -> bool:
    """Return whether something is mounted on the file `path`.

    Args:
        path: of a file, no symbolic link.
        parent_device: `st_dev` of its directory, for kernels that do not report it (before 5.8). On
            overlayfs the devices of file and directory may differ without any mount.
    """
    found = _has_attribute(_STATX_ATTR_MOUNT_ROOT, _AT_FDCWD, path, _AT_SYMLINK_NOFOLLOW)
    return os.stat(path).st_dev != parent_device if found is None else found


def mounted_as(fd: int) -> tuple[str, dict[str, str]]:
    """Return the type of the file system that an open file lies on, and its mount options.

    Raises:
        OSError, ValueError: /proc is not mounted.
    """
    with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    number = fields.get("mnt_id", "").strip()
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split(" ", 1)[0] == number:
                kind, _, options = after.split()
                pairs = (option.partition("=") for option in options.split(","))
                return kind, {name: value for name, _, value in pairs}
    return "", {}


def kind_of(path: str) -> str:
    """Return the type of the file system that holds `path`, such as `ext4`, or `unknown`."""
    try:
        with Descriptors() as files:
            return mounted_as(files.open(path, os.O_PATH))[0] or "unknown"
    except (OSError, ValueError):  # no /proc
        return "unknown"


class DirectFile(NamedTuple):
    """The result of `open_direct`.

    Attributes:
        fd: the descriptor for direct I/O, -1 if there is none.
        alignment: of offset, length and memory of each transfer (bytes).
        refusal: why there is none, or None.
    """

    fd: int
    alignment: int = PAGE
    refusal: Reason | None = None


def open_direct(fd: int, flags: int, block_size: int, files: Descriptors) -> DirectFile:
    """Open the file behind a descriptor for direct I/O in blocks.

    Args:
        fd: of the file.
        flags: how to open it.
        block_size: a multiple of the page size (bytes).
        files: owns the new descriptor.
    """
    wanted = direct_alignment(fd)
    if wanted is None:
        why = Reason("the file system has no direct I/O for this file", SEE_DOCTOR)
        return DirectFile(-1, PAGE, why)
    alignment = max(PAGE, wanted.offset, wanted.memory)
    if block_size % alignment:
        what = f"block_size is not a multiple of the device's {alignment} bytes"
        return DirectFile(-1, alignment, Reason(what, SEE_DOCTOR))
    try:
        return DirectFile(reopen(fd, flags | os.O_DIRECT, files), alignment)
    except FileNotFoundError:
        return DirectFile(-1, alignment, NO_PROC)
    except OSError as error:
        why = Reason(f"direct I/O refused: {error.strerror}", SEE_DOCTOR)
        return DirectFile(-1, alignment, why)


def reserve(fd: int, offset: int, nbytes: int, config: Config) -> None:
    """Reserve the space of a new file, if options and file system are for it.

    Args:
        fd: of the file.
        offset, nbytes: which bytes are going to be written.
        config: the options.

    Raises:
        OSError: there is not enough space.
    """
    wanted = config.preallocate and nbytes > config.small_file
    if wanted and (config.direct is True or not compresses(fd)):
        preallocate(fd, offset, nbytes)


def compresses(fd: int) -> bool:
    """Return whether an open file is compressed, as far as that is known."""
    if _has_attribute(_STATX_ATTR_COMPRESSED, fd):  # `chattr +c`, or from its directory
        return True
    if os.major(os.fstat(fd).st_dev):  # a block device; those below have none
        return False
    try:
        kind, options = mounted_as(fd)
    except (OSError, ValueError):  # no /proc
        return False
    if kind in ("zfs", "bcachefs"):
        return True
    given = {options.get("compress", "none"), options.get("compress-force", "none")}
    return kind == "btrfs" and given != {"none"}


_MEMINFO = "/proc/meminfo"
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # bytes; version 1 reports the largest multiple of a page
# The limit, what is used, and what of that is page cache: of version 2, and of version 1.
_UNIFIED = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_LEGACY = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; nothing where there is no such file."""
    try:
        with open(_MEMINFO, encoding="ascii") as lines:
            found = [line.split() for line in lines]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in found if words[-1] == "kB"}


def available_bytes() -> int | None:
    """Return how much memory programs and page cache can still take, None if unknown.

    What the page cache holds counts as available, as the kernel gives it up for others.
    """
    known = [meminfo().get("MemAvailable"), *_group_rooms()]
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def _group_rooms() -> Iterator[int | None]:
    """Yield what is left in each control group around this process that has a limit."""
    try:
        lines = _OWN_CGROUP.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = _CGROUPS, _UNIFIED
        elif "memory" in controllers.split(","):
            base, names = _CGROUPS / "memory", _LEGACY
        else:
            continue
        # In a container the path may be the host's: what is not there is passed over.
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield _group_room(folder, *names)
            if folder == base:
                break


def _group_room(folder: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    try:
        most = int((folder / limit).read_bytes())  # `max` is no number: no limit
        if most >= _NO_LIMIT:
            return None
        used = int((folder / usage).read_bytes())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + sum(int(fields.get(name, 0)) for name in cache)
    except (OSError, ValueError):
        return None


_BLOCK_DEVICES = Path("/sys/dev/block")


def block_node(number: int) -> Path | None:
    """Return the folder in sysfs of a block device; None for what is on none (tmpfs, NFS)."""
    link = _BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    try:
        return link.resolve(strict=True)
    except OSError:
        return None


def first_line(path: Path) -> str:
    """Return the text of a file in sysfs, empty where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
