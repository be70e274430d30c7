"""A name for the place a file is on that stays the same: over restarts, mounts and new names.

Tried in this order, each together with the type of the file system:

- the UUID of the file system, which the kernel reports to any user (Linux 6.9). It stays with the
  data when a disk gets another name or another slot;
- what the disk itself is called (serial number, WWID, device-mapper UUID, file of a loop device),
  with the number of the partition;
- what is mounted (`server:/export` of a network file system);
- the device number, which may be another one after a restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from fastserial.files import linux

__all__ = ["block_node", "device_key", "first_line"]

_BLOCK_DEVICES = Path("/sys/dev/block")
_FS_IOC_GETFSUUID = 0x80111500
_UUID_BYTES = 16
_OF_PART = ("dm/uuid", "md/uuid", "loop/backing_file")
_OF_DISK = ("wwid", "device/wwid", "serial", "device/serial")


def device_key(fd: int) -> str:
    """Return the lasting name of the file system that an open file or directory is on."""
    kind = linux.kind_of(os.readlink(f"/proc/self/fd/{fd}"))
    number = os.fstat(fd).st_dev
    where = _uuid(fd) or _disk(number) or _mounted(number)
    return f"{kind} {where or f'device {os.major(number)}:{os.minor(number)}'}"


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


def _uuid(fd: int) -> str | None:
    try:
        answer = fcntl.ioctl(fd, _FS_IOC_GETFSUUID, bytes(1 + _UUID_BYTES))
    except OSError:
        return None
    uuid = answer[1 : 1 + answer[0]]
    return f"uuid {uuid.hex()}" if any(uuid) else None  # images are sometimes made without


def _disk(number: int) -> str | None:
    node = block_node(number)
    if node is None:
        return None
    part = first_line(node / "partition")
    disk = node.parent if part else node
    names = [*(node / name for name in _OF_PART), *(disk / name for name in _OF_DISK)]
    found = next((text for path in names if (text := first_line(path))), None)
    return found and f"disk {found}{f' partition {part}' if part else ''}"


def _mounted(number: int) -> str | None:
    """Return the source of a mount, if it says more than the kind of file system."""
    device = f"{os.major(number)}:{os.minor(number)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", errors="replace") as lines:
        for line in lines:
            mount, _, rest = line.partition(" - ")
            words = rest.split()
            if mount.split()[2] == device and len(words) > 1 and set(words[1]) & set(":/"):
                return f"mount {words[1]}"
    return None
