"""What Linux knows of files, devices and memory, and calls that Python has no function for.

Facts used: `statx(STATX_DIOALIGN)` (Linux 6.1) gives the alignment that direct I/O needs.
`fallocate(2)` fails where the file system cannot reserve space, unlike `posix_fallocate`, which
then writes zeros to every block. btrfs compresses neither what is written directly nor what was
reserved before, and reserves the full size; ZFS and bcachefs compress by settings that no mount
option need show.

A node should read a byte from its disk no more often than with stock torch: several processes that
load one file share what each of them reads, and a second load, or a load after a save, finds it in
the page cache. Direct I/O loses that. So

- loads read any file through the page cache that fits in it;
- saves write through it to a device that is slower than the page cache, where that costs no time
  because the device is waited for in any case, and directly to a faster one.

The first large save to a device measures it: the first `TRIAL` bytes go through the page cache, and
the time that the device takes for them is measured. A result expires (`FAST_FOR`, `SLOW_FOR`).

`cachestat(2)` (Linux 6.5) counts the pages of a range that are in the cache. Where it is missing or
forbidden, a few bytes are read with `RWF_NOWAIT`, which fails where a read would wait for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from mmap import PAGESIZE
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from fastserial.config import Config
from fastserial.config.performance import (
    ALWAYS_FITS,
    FAST_DEVICE,
    FAST_FOR,
    PAGE,
    SLOW_FOR,
    TRIAL,
)
from fastserial.interrupts import Descriptors, ours
from fastserial.reasons import SEE_DOCTOR, Reason

PROC = 0x9FA0  # `magic_of` of procfs
# ext4, XFS, btrfs, F2FS, tmpfs, ZFS, bcachefs
LOCAL = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x2FC12FC1, 0xCA451A4E}
_OVERLAY_AND_RAM = {0x794C7630, 0x858458F6}

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
_StatX = ctypes.c_char * 256  # `struct statx`
_ATTRIBUTES = struct.Struct("<8xQ40xQ")  # the attributes, and which of them are known
_MASK, _MOUNT, _ALIGNMENTS = struct.Struct("=I"), struct.Struct("=144xQ"), struct.Struct("=152xII")
# More than any machine's `struct statfs`, which begins with the type, as a word.
_StatFs = (ctypes.c_uint if os.uname().machine == "s390x" else ctypes.c_long) * 64
# Of calls that a save can do without: no other error is the disk's. FUSE servers, network file
# systems and filters of system calls answer what they like.
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_LOCK = struct.Struct("@hhqqi4x")  # `struct flock`: type, whence, start, length, process

_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)
_statfs, _fstatfs = _libc.statfs, _libc.fstatfs
_statfs.argtypes = (ctypes.c_char_p, _StatFs)
_fstatfs.argtypes = (ctypes.c_int, _StatFs)


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
    buffer = _StatX()
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


def magic_of(file: str | int) -> int:
    """Return the number of the file system's type (`f_type` of statfs) that holds a path or fd.

    0 if that is unknown.
    """
    words = _StatFs()
    status = _fstatfs(file, words) if isinstance(file, int) else _statfs(os.fsencode(file), words)
    return words[0] & 0xFFFFFFFF if status == 0 else 0


def is_remote(path: str) -> bool:
    """Return whether a path is on a network file system or FUSE, or on one that we do not know.

    All that lies on a block device is not, nor are overlayfs (whose upper layer cannot be NFS) and
    file systems in memory.
    """
    try:
        device = os.stat(path).st_dev
    except ours(OSError):
        device = 0
    return not os.major(device) and magic_of(path) not in LOCAL | _OVERLAY_AND_RAM


def mount_of(path: str) -> int:
    """Return the number of the mount that holds `path`, 0 if the kernel does not report it."""
    found = _statx_of(_AT_FDCWD, os.fsencode(path), 0, _STATX_MNT_ID | _STATX_MNT_ID_UNIQUE)
    return int(_MOUNT.unpack_from(found)[0]) if found is not None else 0


def is_locked(fd: int) -> bool:
    """Return whether a process holds a POSIX lock (`fcntl.lockf`) on a file, this one included.

    A process loses its own as soon as it closes any descriptor of the file.
    """
    whole_file = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, whole_file)
    except ours(OSError):  # a file system without locks
        return False
    return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def preallocate(fd: int, offset: int, length: int) -> bool:
    """Reserve space for `length` bytes at `offset`; the file grows to hold them.

    Returns False where the file system cannot, or where a signal came: some file systems start over
    after each.

    Raises:
        OSError: there is not enough space (ENOSPC, EDQUOT, EFBIG), or the disk failed (EIO).
    """
    call = _libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, 0, offset, length) == 0:
        return True
    number = ctypes.get_errno()
    if number in OF_THE_DISK:
        raise OSError(number, os.strerror(number))
    return False


def preadv(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Read into pieces from byte `offset` on, and return how many bytes were read.

    Raises:
        OSError: the disk failed.
    """
    try:
        return os.preadv(fd, pieces, offset)
    except ours(PermissionError):  # Python calls preadv2, which a filter of system calls may refuse
        data = os.pread(fd, len(pieces[0]), offset)
        pieces[0][: len(data)] = data
        return len(data)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write bytes to a file from byte `offset` on.

    Raises:
        OSError: the disk is full or failed.
    """
    while data:
        written = os.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.EIO, f"{len(data)} bytes were not written")
        offset += written
        data = data[written:]


def synced(fd: int) -> bool:
    """Put an open file or directory on its device; False where the file system cannot.

    Raises:
        OSError: the device failed.
    """
    try:
        os.fsync(fd)
    except ours(OSError) as error:
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


def is_out_of_inodes(path: str) -> bool:
    """Return whether the file system can hold no more files, however small."""
    try:
        stats = os.statvfs(path)
    except ours(OSError):
        return False
    return stats.f_files > 0 and stats.f_favail == 0


def is_read_only(path: str) -> bool:
    """Return whether the file system that holds `path` is mounted read-only."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except ours(OSError):
        return False


def is_append_only(fd: int) -> bool:
    """Return whether a file or directory may only grow (`chattr +a`)."""
    return bool(_has_attribute(_STATX_ATTR_APPEND, fd))


def _has_attribute(
    attribute: int, fd: int, path: bytes = b"", flags: int = _AT_EMPTY_PATH
) -> bool | None:
    """Return whether a file has an attribute of `statx`, None if the kernel does not report it."""
    found = _statx_of(fd, path, flags, 0)
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
    name, flags = os.fsencode(path), _AT_SYMLINK_NOFOLLOW
    found = _has_attribute(_STATX_ATTR_MOUNT_ROOT, _AT_FDCWD, name, flags)
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
    except ours(OSError, ValueError):  # no /proc
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
    except ours(FileNotFoundError):
        return DirectFile(-1, alignment, NO_PROC)
    except ours(OSError) as error:
        why = Reason(f"direct I/O refused: {error.strerror}", SEE_DOCTOR)
        return DirectFile(-1, alignment, why)


_refusing: set[tuple[int, int]] = set()  # devices that take O_DIRECT, and no direct transfer


def refuse_direct(fd: int, access: int) -> None:
    """Note that the file system of an open file has refused a direct transfer.

    Args:
        fd: of the file.
        access: `os.O_RDONLY` for a read, `os.O_WRONLY` for a write.
    """
    _refusing.add((os.fstat(fd).st_dev, access))


def refuses_direct(fd: int, access: int) -> bool:
    """Return whether the file system of an open file is known to refuse direct transfers."""
    return bool(_refusing) and (os.fstat(fd).st_dev, access) in _refusing


def reserve(fd: int, offset: int, nbytes: int, config: Config) -> None:
    """Reserve the space of a large new file: a full disk is noticed early, extents are contiguous.

    Not where the file system compresses: it would keep the full size.

    Args:
        fd: of the file.
        offset, nbytes: which bytes are going to be written.
        config: the options.

    Raises:
        OSError: there is not enough space.
    """
    if nbytes > config.small_file and (config.direct is True or not compresses(fd)):
        preallocate(fd, offset, nbytes)


def compresses(fd: int) -> bool:
    """Return whether an open file is compressed, as far as that is known."""
    if _has_attribute(_STATX_ATTR_COMPRESSED, fd):  # `chattr +c`, or from its directory
        return True
    if os.major(os.fstat(fd).st_dev):  # a block device; those below have none
        return False
    try:
        kind, options = mounted_as(fd)
    except ours(OSError, ValueError):  # no /proc
        return False
    if kind in ("zfs", "bcachefs"):
        return True
    given = {options.get("compress", "none"), options.get("compress-force", "none")}
    return kind == "btrfs" and given != {"none"}


_MEMINFO = "/proc/meminfo"
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
# The limit, what is used, and what of that is page cache: of version 2, and of version 1.
_UNIFIED = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_LEGACY = (
    "memory.limit_in_bytes",  # far more than any machine has: no limit
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; nothing where there is no such file."""
    try:
        with open(_MEMINFO, encoding="utf-8") as lines:
            found = [line.split() for line in lines]
    except ours(OSError):
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
    except ours(OSError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = (_CGROUPS / "memory", _LEGACY) if controllers else (_CGROUPS, _UNIFIED)
        # In a container the path may be the host's: what is not there is passed over.
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield _group_room(folder, *names)


def _group_room(folder: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    try:
        most = int((folder / limit).read_bytes())  # `max` is no number: no limit
        used = int((folder / usage).read_bytes())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + sum(int(fields[name]) for name in cache)
    except ours(OSError, ValueError, KeyError):
        return None


_BLOCK_DEVICES = Path("/sys/dev/block")


def block_node(number: int) -> Path | None:
    """Return the folder in sysfs of a block device; None for what is on none (tmpfs, NFS)."""
    link = _BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    try:
        return link.resolve(strict=True)
    except ours(OSError):
        return None


def first_line(path: Path) -> str:
    """Return the text of a file in sysfs, empty where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except ours(OSError):
        return ""


# -- the page cache ------------------------------------------------------------------------------


def fits(nbytes: int) -> bool:
    """Return whether that many bytes fit in the page cache."""
    if nbytes <= ALWAYS_FITS:
        return True
    available = available_bytes()
    return available is None or nbytes <= available


def reads_through_cache(config: Config, nbytes: int) -> bool:
    """Return whether all of a file of `nbytes` bytes is read through the page cache.

    Otherwise only what is in it already, and the rest directly.
    """
    if config.never_direct or config.direct is True or config.cache == "drop":
        return config.never_direct
    return config.cache == "keep" or fits(nbytes)


_CACHESTAT = 451  # the same on every architecture that torch runs on; on MIPS it is not a call
_COUNTS = 5  # of pages: cached, dirty, being written, evicted, recently evicted
_PROBES = 4


def cached_bytes(fd: int, offset: int, length: int) -> int | None:
    """Return how many bytes of a file's range are in the page cache, None if it is unknown.

    Whole pages are counted, so the result may exceed `length` by almost two of them. Huge pages of
    tmpfs and hugetlbfs count as well.
    """
    counts = (ctypes.c_uint64 * _COUNTS)()
    wanted = (ctypes.c_uint64 * 2)(offset, length)
    if _libc.syscall(_CACHESTAT, fd, wanted, counts, 0) != 0:
        return None
    return int(counts[0]) * PAGESIZE


def cached_fraction(fd: int, offset: int, length: int) -> float | None:
    """Return the part of a file's range that is in the page cache, 0.0 to 1.0.

    Without `cachestat` it is an estimate from a few bytes; None: it is unknown.
    """
    if length <= 0:
        return None
    start = offset - offset % PAGESIZE
    pages = -(-(offset + length - start) // PAGESIZE)
    cached = cached_bytes(fd, start, pages * PAGESIZE)
    return _probe(fd, offset, length) if cached is None else min(1.0, cached / (pages * PAGESIZE))


def _probe(fd: int, offset: int, length: int) -> float | None:
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return None
    offsets = sorted({offset + (length - 1) * step // (_PROBES - 1) for step in range(_PROBES)})
    byte = bytearray(1)
    present = 0
    for at in offsets:
        try:
            present += os.preadv(fd, [byte], at, nowait)
        except ours(BlockingIOError):
            continue
        except ours(OSError):  # a file system without it
            return None
    return present / len(offsets)


_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4

_sync_file_range = getattr(_libc, "sync_file_range", None)


_speeds: dict[int, tuple[bool, float]] = {}  # by device: whether it is fast, and when it was found


def is_fast(fd: int) -> bool | None:
    """Return whether the device of an open file is fast, None if that is to be measured."""
    fast, at = _speeds.get(os.fstat(fd).st_dev, (False, -inf))
    return None if perf_counter() - at > (FAST_FOR if fast else SLOW_FOR) else fast


def begin_writeback(fd: int, offset: int, length: int) -> None:
    """Start to write a range that is in the page cache to the device.

    Raises:
        OSError: the device failed.
    """
    _sync(fd, offset, length, _WRITE)


class Trial:
    """How long a device takes for the first blocks of a file, which go through the page cache."""

    def __init__(self, fd: int) -> None:
        """Begin when the first block is to be written to the file of a descriptor."""
        self._fd = fd
        self._began = perf_counter()
        self._nbytes = 0  # that were taken,
        self._first: float = inf  # from here
        self._end = 0  # to there: there may be holes between

    def take(self, offset: int, length: int) -> None:
        """Note a range that is to be written."""
        self._first = min(self._first, offset)
        self._end = max(self._end, offset + length)
        self._nbytes += length

    @property
    def is_enough(self) -> bool:
        """Whether so much was taken that it shows how fast the device is."""
        return self._nbytes >= TRIAL

    def judge(self) -> bool:
        """Write back what was taken; return whether the device is fast.

        Raises:
            OSError: the device failed.
        """
        began, first = perf_counter(), int(self._first)
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
        if not _sync(self._fd, first, self._end - first, flags):
            return False
        device = os.fstat(self._fd).st_dev
        # without a block device (network, FUSE) the writes themselves may have waited for it,
        # and those to a file opened with O_SYNC or O_DSYNC, which is part of it, did
        waited = not os.major(device) or fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DSYNC
        ended = perf_counter()
        fast = self._nbytes > (ended - (self._began if waited else began)) * FAST_DEVICE
        _speeds[device] = fast, ended
        return fast


def _sync(fd: int, offset: int, length: int, flags: int) -> bool:
    """Return False where there is no such call.

    Raises:
        OSError: the device failed.
    """
    if _sync_file_range is None:
        return False
    span = ctypes.c_int64(offset), ctypes.c_int64(length)
    if _sync_file_range(fd, *span, ctypes.c_uint(flags)) == 0:
        return True
    number = ctypes.get_errno()
    if number in OF_THE_DISK:  # the sync at the end would not report it again
        raise OSError(number, os.strerror(number))
    return False


# -- owner, mode, ACL, extended attributes ---------------------------------------------------------

# Made for the old content: the kernel takes them off a file that is written to.
_OF_THE_CONTENT = frozenset({"security.capability", "security.evm", "security.ima"})
# Users, administrators and the kernel rely on these; other kinds belong to the file system.
_KEPT = ("user.", "security.", "system.", "btrfs.")
_ACL = "system."
_NOBODY = 65534  # what the kernel shows for an owner who is not known here


class Attributes(NamedTuple):
    """A file's permission bits, user and group, and its extended attributes, ACL included."""

    mode: int
    owner: tuple[int, int]
    extended: dict[str, bytes]


def attributes_of(status: os.stat_result, file: int | str) -> Attributes:
    """Return the attributes of a regular file.

    Args:
        status: of the file.
        file: its descriptor or path.

    Raises:
        OSError: an attribute may not be read, the disk failed, or the file is gone.
    """
    follow = isinstance(file, int)
    extended: dict[str, bytes] = {}
    try:
        for name in os.listxattr(file, follow_symlinks=follow):
            if name.startswith(_KEPT) and name not in _OF_THE_CONTENT:
                extended[name] = os.getxattr(file, name, follow_symlinks=follow)
    except ours(OSError) as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):  # there are none
            raise
    return Attributes(stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid), extended)


def apply_umask(fd: int, directory: int) -> None:
    """Take the permissions off a new nameless file that `umask` denies.

    Before Linux 6.0 the kernel does not, on a mount without ACLs (with them, those of the directory
    may grant more).

    Args:
        fd: of a file that was just made with O_TMPFILE.
        directory: descriptor of the directory that it is in.

    Raises:
        OSError: it cannot be changed.
    """
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & 0o666 != 0o666:  # the kernel does, or an ACL of the directory did
        return
    try:
        os.getxattr(directory, "system.posix_acl_default")
    except ours(OSError) as error:
        if error.errno == errno.EOPNOTSUPP:
            os.fchmod(fd, mode & ~_umask())


def _umask() -> int:
    """Return the process's umask; that denies all to others where it is not known (Linux 4.6)."""
    try:
        with open("/proc/thread-self/status", encoding="utf-8", errors="replace") as lines:
            return next(int(line[6:], 8) for line in lines if line.startswith("Umask:"))
    except ours(OSError, ValueError, StopIteration):
        return 0o077


def set_attributes(fd: int, wanted: Attributes) -> None:
    """Give a new file of ours, which has no more permissions, the attributes of another one.

    Raises:
        OSError: one of them is refused, or the disk is full or failed.
    """
    made = attributes_of(os.fstat(fd), fd)
    if made == wanted:
        return
    if any(one == _NOBODY != own for one, own in zip(wanted.owner, made.owner, strict=True)):
        raise OSError(errno.EPERM, "its owner is unknown in this user namespace")  # or `nobody`
    names = made.extended.keys() | wanted.extended.keys()
    differing = {name for name in names if made.extended.get(name) != wanted.extended.get(name)}
    lists = {name for name in differing if name.startswith(_ACL)}
    _set_extended(fd, differing - lists, wanted)  # as long as the file is ours
    if made.owner != wanted.owner:
        os.fchown(fd, *wanted.owner)
    # An ACL changes the group's bits, a new owner clears others. Where the owner is not us,
    # this takes the right that replacing a file in a sticky directory takes.
    _set_extended(fd, lists, wanted)
    if stat.S_IMODE(os.fstat(fd).st_mode) != wanted.mode or made.owner != wanted.owner:
        os.fchmod(fd, wanted.mode)
    now = attributes_of(os.fstat(fd), fd)  # some file systems only pretend
    has_lists = all((name in now.extended) == (name in wanted.extended) for name in lists)
    if now.owner != wanted.owner or (now.mode ^ wanted.mode) & 0o777 or not has_lists:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _set_extended(fd: int, names: set[str], wanted: Attributes) -> None:
    """Set extended attributes, and remove those that were inherited from the folder."""
    for name in names:
        if name in wanted.extended:
            os.setxattr(fd, name, wanted.extended[name])
        else:
            os.removexattr(fd, name)
