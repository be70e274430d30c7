"""An optional line of progress on standard error for long saves and loads."""

from __future__ import annotations

import logging
import os
import sys
import threading
from time import monotonic

from fastserial.interrupts import Locked, ours
from fastserial.printable import printable

_MIB = 1 << 20
_LEAST = 16 * _MIB  # bytes; less is done before a line is read
_WIDEST = 30  # characters of a name
_SECONDS = 0.1  # between two changes of the line
_log = logging.getLogger("fastserial")


def show_line(text: str, end: str = "") -> None:
    """Show a line on standard error in place of the one before; elsewhere only one with an end."""
    terminal = sys.stderr.isatty()
    if terminal or end:
        sys.stderr.write(f"\r{printable(text)}\x1b[K{end}" if terminal else printable(text) + end)
        sys.stderr.flush()


class ProgressBar:
    """Counts bytes, and shows them on a terminal once there are enough of them.

    One that cannot be shown any more (its terminal is gone) is dropped: the save continues.
    """

    def __init__(self, name: str | None) -> None:
        """Count for a file of this name; None: show nothing."""
        self._name = name
        self._total: int | None = None
        self._done = 0
        self._began = self._shown = monotonic()
        self._lock = threading.Lock()  # blocks are read and written on several threads

    def expect(self, nbytes: int) -> None:
        """Set the total number of bytes."""
        self._total = nbytes

    def update(self, nbytes: int) -> None:
        """Count bytes that are done."""
        if self._name is None:
            return
        with Locked(self._lock):
            self._done += nbytes
            if monotonic() - self._shown >= _SECONDS:
                self._show()

    def close(self) -> None:
        """Leave the line as it stands."""
        with Locked(self._lock):
            self._show("\n")
            self._name = None

    def _show(self, end: str = "") -> None:
        if self._name is None or max(self._done, self._total or 0) < _LEAST:
            return
        self._shown = monotonic()
        name = os.path.basename(self._name)
        name = name if len(name) <= _WIDEST else f"…{name[1 - _WIDEST :]}"
        total = f"/{self._total / _MIB:.1f}" if self._total is not None else ""
        speed = self._done / _MIB / max(self._shown - self._began, 1e-3)
        try:
            show_line(f"{name}  {self._done / _MIB:.1f}{total} MiB  {speed:.0f} MiB/s", end)
        except ours(Exception) as error:
            self._name = None
            _log.warning("the progress cannot be shown: %r", error)
