"""A fast disk made of memory: XFS on a loop device with direct I/O over tmpfs.

Right after it is mounted, the backing file loses its name and the loop device is marked for
release: what `umount` leaves behind, whoever calls it, is nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from fastserial.bench.measuring.errors import BenchError
from fastserial.diagnosis.folder import device_of
from fastserial.files.meminfo import meminfo
from fastserial.reports import format_bytes

__all__ = ["create", "remove"]

_MEMORY = Path("/dev/shm")
_PREFIX = "fastserial-ramdisk-"
_TOOLS = {"losetup": "mount", "mkfs.xfs": "xfsprogs", "mount": "mount", "umount": "mount"}


def create(folder: Path, nbytes: int) -> None:
    """Mount a new file system of `nbytes` bytes at a folder.

    Raises:
        BenchError: not root, too little memory, a tool is missing or failed. Nothing is left then.
    """
    _check_root()
    _check_tools()
    if folder.exists() and not folder.is_dir():
        raise BenchError(f"{folder} is not a directory: give a folder, it is made if missing")
    if folder.is_dir() and os.path.ismount(folder):
        raise BenchError(f"something is mounted at {folder} already")
    available = meminfo().get("MemAvailable", nbytes)
    if nbytes > available:
        raise BenchError(
            f"{format_bytes(nbytes)} are wanted, {format_bytes(available)} of memory are "
            "available: give a smaller --size"
        )
    with ExitStack() as undo:
        for path in [*reversed(folder.parents), folder]:
            if not path.exists():
                path.mkdir()
                undo.callback(path.rmdir)
        handle, image = tempfile.mkstemp(prefix=_PREFIX, suffix=".img", dir=_MEMORY)
        with ExitStack() as release:  # goes after success, too: umount then frees all
            release.callback(os.unlink, image)
            os.truncate(handle, nbytes)
            os.close(handle)
            loop = _run("losetup", "--find", "--show", "--direct-io=on", image).strip()
            release.callback(_run, "losetup", "--detach", loop)
            _run("mkfs.xfs", "-q", "-f", loop)
            _run("mount", "-t", "xfs", loop, str(folder))
            undo.callback(_run, "umount", str(folder))
        undo.pop_all()


def remove(folder: Path) -> None:
    """Unmount what `create` mounted.

    Raises:
        BenchError: not root, nothing of ours is mounted there, or it is in use.
    """
    _check_root()
    if not folder.is_dir() or not os.path.ismount(folder):
        raise BenchError(f"nothing is mounted at {folder}")
    backing = device_of(folder).backing_file
    if not backing.startswith(str(_MEMORY / _PREFIX)):
        raise BenchError(f"what is mounted at {folder} was not made by `ramdisk create`")
    _run("umount", str(folder))


def _check_root() -> None:
    if os.geteuid() != 0:
        raise BenchError("mounting needs root: run it with sudo, or as root")


def _check_tools() -> None:
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise BenchError(f"{tool} is not installed: apt-get install {package}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().partition("\n")[0]  # mkfs adds its manual
        raise BenchError(f"{' '.join(command)} failed: {words or done.returncode}")
    return done.stdout
