"""File systems to try: made in files, mounted, and taken down whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

import pytest
from support import processes

_MIRROR = Path(__file__).with_name("mirror.py")
_PACKAGES = {
    "strace": "strace",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "mkfs.ext4": "e2fsprogs",
    "gcc": "gcc",
    "fusermount": "fuse3",
    "losetup": "util-linux",
    "unshare": "util-linux",
    "bindfs": "bindfs",
}
_MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}


_CLONE_NEWNS = 0x20000


def own_mounts() -> None:
    """Give this process a mount namespace of its own, for good.

    Then what it mounts ends with it, however it ends; and FUSE file systems whose program is dead
    can be taken out of sight: they make `mkfs.btrfs` fail, whatever it is used on.
    """
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return  # not root, or not allowed to mount either
    run("mount", "--make-rprivate", "/")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("fuse"):
            where = before.split()[4].encode().decode("unicode_escape")
            try:
                os.stat(where)
            except OSError:
                run("umount", "-l", where)


def need(*tools: str, root: bool = True) -> None:
    """Skip the test if it cannot run here, and say what is missing."""
    if root and os.geteuid() != 0:
        pytest.skip("needs root")
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (apt-get install {_PACKAGES[tool]})")


def run(*words: str | os.PathLike[str]) -> str:
    """Run a command and return its output; a failure is a test error with the command's words."""
    done = subprocess.run(
        [os.fspath(word) for word in words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def fill(path: Path, leave: int, free: str = "f_bfree") -> None:
    """Make a file that takes all but about `leave` bytes.

    Args:
        free: what counts as free: `f_bfree` with root's reserve, `f_bavail` without it.
    """
    with path.open("wb", buffering=0) as file:
        more = 1 << 40
        size = 0
        while more >= 4096:
            stats = os.statvfs(path)
            more = min(more, getattr(stats, free) * stats.f_frsize - leave)
            try:
                if more > 0:
                    os.posix_fallocate(file.fileno(), size, more)
                    size += more
            except OSError:  # there is less in one piece, or after the file system's own needs
                more //= 2
        os.fsync(file.fileno())


class Lab:
    """Makes file systems below a folder; leaving it unmounts and detaches everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._count = 0

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _new(self, suffix: str) -> Path:
        self._count += 1
        return self.folder / f"{self._count}.{suffix}"

    def image(self, nbytes: int, folder: Path | None = None) -> Path:
        """Make an empty image file (sparse)."""
        path = self._new("img") if folder is None else folder / self._new("img").name
        path.touch()
        os.truncate(path, nbytes)
        return path

    def loop(self, image: Path, *options: str) -> str:
        """Attach a loop device."""
        device = run("losetup", "--find", "--show", *options, image)
        self._stack.callback(self._detach, device)
        return device

    def _detach(self, device: str) -> None:
        subprocess.run(["losetup", "-d", device], capture_output=True, check=False)

    def mount(self, source: str | Path, kind: str, *options: str) -> Path:
        """Mount something and return where."""
        where = self._new("mnt")
        where.mkdir()
        words = ["-o", ",".join(options)] if options else []
        run("mount", "-t", kind, *words, source, where)
        self._stack.callback(self.unmount, where)
        return where

    def unmount(self, where: Path) -> None:
        """Unmount, waiting for what may still be open."""
        for _ in range(50):
            if not os.path.ismount(where):
                return
            if subprocess.run(["umount", where], capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.1)
        subprocess.run(["umount", "-l", where], capture_output=True, check=False)

    def make(self, kind: str, nbytes: int, *options: str, sector: int = 512) -> Path:
        """Make and mount a file system in an image file.

        Args:
            kind: such as `ext4`.
            nbytes: size of the image.
            options: for the mount.
            sector: the device's logical block (bytes).
        """
        device = self.loop(self.image(nbytes), "--direct-io=on", f"--sector-size={sector}")
        run(*_MKFS[kind], device)
        return self.mount(device, kind, *options)

    def mkfs(self, kind: str, device: str | Path, *options: str) -> None:
        run(*_MKFS[kind], *options, device)

    def bind(self, source: Path, where: Path) -> None:
        """Mount a file over another."""
        run("mount", "--bind", source, where)
        self._stack.callback(run, "umount", where)

    def local_locks(self, folder: Path) -> Path:
        """Mount a folder once more, with locks of its own."""
        where = self._new("bindfs")
        where.mkdir()
        run("bindfs", folder, where)
        self._stack.callback(self.unmount, where)
        return where

    def mirror_of_below(self, *options: str) -> Path:
        """Make the folder `below`, and mount it by `mirror`."""
        (self.folder / "below").mkdir()
        return self.mirror(self.folder / "below", *options)

    def mirror(self, folder: Path, *options: str) -> Path:
        """Mount `mirror.py`, a FUSE file system in Python, over a folder."""
        need("fusermount")
        if ctypes.util.find_library("fuse") is None:
            pytest.skip("needs libfuse (apt-get install libfuse2)")
        pytest.importorskip("fuse", reason="needs fusepy (pip install fusepy)")
        where = self._new("fuse")
        where.mkdir()
        process = processes.start(_MIRROR, folder, where, *options, stdin=None, stdout=None)
        self._stack.callback(process.wait, 30)
        self._stack.callback(self.unmount, where)
        deadline = time.monotonic() + 30
        while not os.path.ismount(where):
            assert process.poll() is None, "mirror.py ended"
            assert time.monotonic() < deadline, "mirror.py does not mount"
            time.sleep(0.01)
        return where
