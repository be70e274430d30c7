"""How much memory there is, in bytes: /proc/meminfo, and the limits of control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes", "meminfo"]

_PATH = "/proc/meminfo"
_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
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
        with open(_PATH, encoding="ascii") as lines:
            found = [line.split() for line in lines]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in found if words[-1] == "kB"}


def available_bytes() -> int | None:
    """Return how much memory programs and page cache can still take, None if unknown.

    What the page cache holds counts as available, as the kernel gives it up for others.
    """
    known = [meminfo().get("MemAvailable"), *_rooms()]
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def _rooms() -> Iterator[int | None]:
    """Yield what is left in each control group around this process that has a limit."""
    try:
        lines = _GROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = _MOUNT, _UNIFIED
        elif "memory" in controllers.split(","):
            base, names = _MOUNT / "memory", _LEGACY
        else:
            continue
        # In a container the path may be the host's: what is not there is passed over.
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield _room(folder, *names)
            if folder == base:
                break


def _room(folder: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    try:
        most = int((folder / limit).read_bytes())  # `max` is no number: no limit
        if most >= _NO_LIMIT:
            return None
        used = int((folder / usage).read_bytes())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + sum(int(fields.get(name, 0)) for name in cache)
    except (OSError, ValueError):
        return None
