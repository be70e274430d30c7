"""An optional progress bar for long saves and loads."""

from __future__ import annotations

import logging
import os
import threading
from time import monotonic
from typing import Any

from fastserial.printable import printable

__all__ = ["ProgressBar", "progress_bar"]

_LEAST = 16 << 20  # bytes; less is done before a bar is read
_WIDEST = 30  # characters of a name
_SECONDS = 0.1  # between two looks of a bar
_log = logging.getLogger("fastserial")


class ProgressBar:
    """Counts bytes, and shows them on standard error once there are enough of them.

    A bar that cannot be shown any more (its terminal is gone) is dropped: the save continues.
    """

    def __init__(self, name: str | None) -> None:
        """Count for a file of this name; None: show nothing."""
        self._name = name
        self._total: int | None = None
        self._done = 0
        self._bar: Any = None
        self._shown = 0.0  # when, in seconds of `monotonic`
        self._lock = threading.Lock()  # blocks are read and written on several threads

    def expect(self, nbytes: int) -> None:
        """Set the total number of bytes."""
        self._total = nbytes
        self.update(0)

    def update(self, nbytes: int) -> None:
        """Count bytes that are done."""
        if self._name is None:
            return
        with self._lock:
            self._done += nbytes
            if max(self._done, self._total or 0) >= _LEAST:
                self._show()

    def close(self) -> None:
        """Leave the bar as it stands."""
        with self._lock:
            if self._bar is not None:
                self._show(last=True)
            self._name = self._bar = None

    def _show(self, last: bool = False) -> None:
        if self._name is None:
            return
        try:
            if self._bar is None:
                self._bar = _made(printable(os.path.basename(self._name)))
            refresh = monotonic() - self._shown > _SECONDS
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=self._done, total=self._total, refresh=refresh)
            if refresh:
                self._shown = monotonic()
            if last:
                self._bar.stop()
        except Exception as error:
            self._name = self._bar = None
            _log.warning("the progress bar cannot be shown: %r", error)


def progress_bar(wanted: bool, name: str) -> ProgressBar:
    """Return a bar if it is wanted, else one that shows nothing."""
    return ProgressBar(name if wanted else None)


def _made(name: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        DownloadColumn(binary_units=True),
    )
    bar = Progress(  # without a thread of its own, and with the program's streams left alone
        *columns,
        TransferSpeedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task(name if len(name) <= _WIDEST else f"…{name[1 - _WIDEST :]}", total=None)
    bar.start()
    return bar
