"""`fastserial.summary()`: what the saves and loads of this process did, and which way they went.

With `FASTSERIAL_SUMMARY=1` in the environment it is printed to standard error at the exit.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from fastserial.files.linux import NO_PROC
from fastserial.patching.install import status
from fastserial.printable import printable
from fastserial.reports import LOADS, SAVES, Counts, format_bandwidth, format_bytes

__all__ = ["Direction", "Summary", "Way", "print_summary", "summary"]

_UNKNOWN = "not known"
_GIVE_A_PATH = (
    "give torch.save a path, or a plain file object; Lightning: plugins=[FastCheckpointIO()]"
)
_A_FILE = "save to a file on a disk"
_OWNER = "save into a directory of this user's, or as the file's owner"
_REPLACE = "save to a directory where files can be renamed"
_NONE = "none needed: it is the quicker way"
_ASKED = "none needed: the program asked for it"
_DIRECT = "see `fastserial doctor FOLDER`"

# Why a save or a load went another way, by how that begins, and what to do.
REMEDIES = {
    "not a plain file object": _GIVE_A_PATH,
    "not a file name": "give torch.save the name of a file",
    "not a regular file": _A_FILE,
    "an open descriptor, not a file": "give torch.save the file's path",
    "not a file on a file system": _A_FILE,
    "its path is bytes, not text": "give torch.save a str or a Path",
    "the file is not open for writing": 'open it with "wb"',
    "the file is open for appending": 'open it with "wb", or give torch.save a path',
    "the file's position is not known": _GIVE_A_PATH,
    "too few file descriptors": "raise the limit (`ulimit -n`)",
    "the storage_alignment does not fit": "set a smaller storage_alignment",
    "the directory is not readable": "let this user read the directory",
    "this process may not write to the directory": "let this user write to the directory",
    "the file is another user's": _OWNER,
    "the file is a mount point": "mount the directory instead of the file",
    "this process has the file open": "close the file before it is saved to",
    "nothing in an append-only directory": _REPLACE,
    "in an append-only directory": _REPLACE,
    "the file system only takes the bytes": _REPLACE,
    "the file system cannot rename": _REPLACE,
    "no new file can be made beside it": _OWNER,
    "a new file cannot have its": _OWNER,
    "its owner is unknown": _OWNER,
    "its extended attributes cannot be read": _OWNER,
    "its attribute ": _OWNER,
    "no inode is free": "remove files that nobody needs",
    "not a plain file on a file system": "load from a path, or a plain file object",
    "mmap=True": _ASKED,
    "fake tensors": _ASKED,
    "meta tensors": _ASKED,
    "skip_data": _ASKED,
    "a small file": _NONE,
    "no storages": _NONE,
    "many small records": _NONE,
    "many small storages": _NONE,
    "the archive does not start at byte 0": "load from a file of its own",
    "no thread to read ahead": "raise the limit on threads (`ulimit -u`)",
    "through the page cache": _DIRECT,
    "direct I/O refused": _DIRECT,
    NO_PROC: "mount /proc",
    "the file is locked": "end the lock (lockf) before the file is saved to",
    "the file system compresses this file": _NONE,
    "another thread keeps the interpreter busy": "give that thread a process of its own",
    "the file system cannot sync": "save to a local disk, if the file must survive a power cut",
}


@dataclass(frozen=True, slots=True)
class Way:
    """A reason: why, for how many, and what to do (None: not known)."""

    reason: str
    count: int
    remedy: str | None


@dataclass(frozen=True, slots=True)
class Direction:
    """Saves, or loads.

    Attributes:
        count: how many there were.
        by_torch: how many of them went torch's own way.
        nbytes: bytes that fastserial moved.
        seconds: that these took, together; also beside the program.
        why_torch: why they went torch's own way.
        why_slower: why fastserial could not go its fastest way.
    """

    count: int
    by_torch: int
    nbytes: int
    seconds: float
    why_torch: tuple[Way, ...]
    why_slower: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What `summary` returns; `str` of it is a table.

    Attributes:
        installed: torch runs fastserial's functions now.
        reason: why not, or None.
        saves, loads: what there was. Loads from memory (`BytesIO`) do not count, nor what torch
            did while fastserial was not installed.
    """

    installed: bool
    reason: str | None
    saves: Direction
    loads: Direction

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dictionary for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        used = any(one.count > one.by_torch for one in (self.saves, self.loads))
        stock = f"torch.save and torch.load are stock ({self.reason})"
        if used:  # by `save_async`, a `Checkpointer`, a plugin: they need no `install()`
            stock = f"used through its own functions; {stock}"
        state = "installed" if self.installed else stock
        lines = [f"fastserial{_rank()}: {state}"]
        for name, one in (("saves", self.saves), ("loads", self.loads)):
            lines.append(_line(name, one))
            lines += _ways("torch's own way", one.why_torch)
            lines += _ways("not the fastest way", one.why_slower)
        return "\n".join(map(printable, lines))


def summary() -> Summary:
    """Return what the saves and loads of this process did so far, and why some went torch's way."""
    found = status()
    return Summary(found.installed, found.reason, _direction(SAVES), _direction(LOADS))


def print_summary() -> None:
    """Print the summary to standard error."""
    stream = sys.stderr
    if stream is not None:
        stream.write(f"{summary()}\n")


def _direction(counts: Counts) -> Direction:
    return Direction(
        counts.count,
        counts.by_torch,
        counts.nbytes,
        counts.seconds,
        _told(counts.reasons),
        _told(counts.slower),
    )


def _told(reasons: dict[str | None, int]) -> tuple[Way, ...]:
    ordered = sorted(dict(reasons).items(), key=lambda item: -item[1])
    return tuple(Way(why or _UNKNOWN, count, _remedy(why or "")) for why, count in ordered)


def _remedy(reason: str) -> str | None:
    found = (remedy for beginning, remedy in REMEDIES.items() if reason.startswith(beginning))
    return next(found, None)


def _line(name: str, one: Direction) -> str:
    line = f"  {name}: {one.count}"
    if ours := one.count - one.by_torch:
        line += f", {ours} by fastserial: {format_bytes(one.nbytes)} in {one.seconds:.2f} s"
        if one.seconds:
            line += f", {format_bandwidth(one.nbytes / one.seconds)}"
    if one.by_torch:
        line += f", {one.by_torch} torch's own way"
    return line


def _ways(title: str, ways: tuple[Way, ...]) -> list[str]:
    lines = []
    for way in ways:
        remedy = f" -> {way.remedy}" if way.remedy is not None else ""
        lines.append(f"    {way.count} {title}: {way.reason}{remedy}")
    return lines


def _rank() -> str:
    rank = os.environ.get("RANK")
    return f" (rank {rank})" if rank else ""
