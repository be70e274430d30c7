"""What a folder's file system and device can do, found by trying."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from fastserial.config.performance import PAGE
from fastserial.errors import REMEDIES
from fastserial.files import linux, temporary
from fastserial.files.linux import DirectAlignment, block_node, first_line
from fastserial.interrupts import Descriptors
from fastserial.memory.buffers import BufferPool

_TRIAL = 1 << 20  # bytes that are written to a folder


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What saves to a folder can use.

    Attributes:
        problem: why no file can be written there; then the rest is not known.
        free_bytes: what users other than root may still write, None if it is not known.
        device: name and model of the block device, empty if there is none (tmpfs, NFS, overlay).
        alignment: what direct I/O needs; None: the kernel says the file system has none.
        direct_problem: why a direct write failed; None: it worked.
        leftovers: temporary files of killed saves.
        remedy: what helps against `problem`, None if it does not say.
    """

    path: str
    problem: str | None
    file_system: str
    device: str
    free_bytes: int | None
    alignment: DirectAlignment | None = None
    direct_problem: str | None = None
    leftovers: tuple[str, ...] = ()
    remedy: str | None = None


def probe_folder(folder: Path) -> FolderFacts:
    """Try what a folder can do: create a file, write 1 MiB and sync it. The file is removed.

    Raises:
        OSError: it is no directory, or cannot be read.
    """
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize if stats.f_blocks else None
    where = str(folder.absolute())
    kind, device = linux.kind_of(where), _device_of(folder)
    left = leftovers(folder)
    found = FolderFacts(where, None, kind, device, free, leftovers=left)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".fastserial-probe-") as file:
            linux.write_all(file.fileno(), memoryview(os.urandom(_TRIAL)), 0)
            linux.synced(file.fileno())  # some file systems find only now that the disk is full
            alignment = linux.direct_alignment(file.fileno())
            problem = _try_direct(file.fileno(), alignment)
            return replace(found, alignment=alignment, direct_problem=problem)
    except OSError as error:
        no_inodes = error.errno == errno.ENOSPC and stats.f_files and not stats.f_favail
        problem = "it has no free inodes" if no_inodes else error.strerror or str(error)
        return replace(found, problem=problem, remedy=REMEDIES.get(error.errno or 0))


def folder_problem(folder: Path) -> str | None:
    """Return why a path is not a folder to save to, and what to do; None if it is one."""
    if folder.is_dir():
        return None
    if folder.exists():
        return f"{folder} is not a directory: give the folder that checkpoints are saved to"
    return f"{folder} is not a directory: there is no such path; create it first"


def leftovers(folder: Path) -> tuple[str, ...]:
    """Return the names of temporary files in a folder whose save was killed.

    Raises:
        OSError: it is no directory, or cannot be read.
    """
    with Descriptors() as files:
        directory = files.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        return tuple(sorted(temporary.leftovers(directory)))


def _device_of(path: Path) -> str:
    """Return name and model of the block device of a path."""
    node = block_node(os.stat(path).st_dev)
    if node is None:
        return ""
    # a partition has its queue and model one level up
    disk = node if (node / "queue").is_dir() else node.parent
    backing = first_line(disk / "loop/backing_file")
    over = f"(a loop device over {backing})" if backing else ""
    return " ".join(filter(None, (node.name, first_line(disk / "device/model"), over)))


def _try_direct(fd: int, alignment: DirectAlignment | None) -> str | None:
    """Return why a direct write to a file fails, None if it works."""
    size = max(PAGE, alignment.offset if alignment is not None else 0)
    pool = BufferPool(1, size)
    files = Descriptors()
    try:
        direct = linux.reopen(fd, os.O_RDWR | os.O_DIRECT, files)
        view = pool.take().view
        view[:] = os.urandom(size)
        written = os.pwrite(direct, view, 0)
        if written != size or os.pread(fd, size, 0) != view:
            return "what was written is not what is read"
    except FileNotFoundError:
        return linux.NO_PROC
    except OSError as error:
        return error.strerror or str(error)
    finally:
        files.close()
        pool.close()
    return None
