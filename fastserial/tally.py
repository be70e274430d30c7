"""Counts what the saves and loads of this process did, for `fastserial.summary()`."""

from __future__ import annotations

import os
import threading

__all__ = ["LOADS", "SAVES", "Counts"]

_MOST = 32  # reasons told apart
_OTHERS = "other reasons"


class Counts:
    """Of saves or loads.

    Attributes:
        count: how many there were.
        nbytes: bytes moved by fastserial.
        seconds: that these bytes took, together; also beside the program.
        by_torch: how many went torch's own way.
        reasons: why, and how many for each; None: not known.
        slower: why fastserial did not go its fastest way, and how many for each.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._lock = threading.RLock()  # a signal handler may save, too
        self.count = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.by_torch = 0
        self.reasons: dict[str | None, int] = {}
        self.slower: dict[str | None, int] = {}

    def add(self, nbytes: int, seconds: float, reason: str | None) -> None:
        """Count one that fastserial did; `reason`: why not the fastest way, or None."""
        with self._lock:
            self.count += 1
            self.nbytes += nbytes
            self.seconds += seconds
            if reason is not None:
                _count(self.slower, reason)

    def add_torchs(self, reason: str | None) -> None:
        """Count one that torch did."""
        with self._lock:
            self.count += 1
            self.by_torch += 1
            _count(self.reasons, reason)


def _count(counts: dict[str | None, int], reason: str | None) -> None:
    if reason not in counts and len(counts) >= _MOST:
        reason = _OTHERS
    counts[reason] = counts.get(reason, 0) + 1


SAVES = Counts()
LOADS = Counts()


def _in_child() -> None:
    SAVES.clear()
    LOADS.clear()


os.register_at_fork(after_in_child=_in_child)
