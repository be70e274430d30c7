"""/proc/meminfo, in bytes."""

from __future__ import annotations

__all__ = ["meminfo"]

_PATH = "/proc/meminfo"


def meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; nothing where there is no such file."""
    try:
        with open(_PATH, encoding="ascii") as lines:
            found = [line.split() for line in lines]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in found if words[-1] == "kB"}
