"""A folder for the files of a benchmark that is gone afterwards, whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fastserial.bench.measuring.errors import BenchError
from fastserial.diagnosis.folder import folder_problem
from fastserial.reports import format_bytes

__all__ = ["scratch"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def scratch(folder: Path, needed: int) -> Iterator[Path]:
    """Yield a new folder inside `folder`; it is removed after errors, Ctrl-C and SIGTERM, too.

    Args:
        folder: where to measure; it must exist.
        needed: bytes that must be free there.

    Raises:
        BenchError: the folder is missing or not writable, or there is too little space.
    """
    problem = folder_problem(folder)
    if problem is not None:
        raise BenchError(problem)
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if free < needed:
        raise BenchError(
            f"{folder} has {format_bytes(free)} free, {format_bytes(needed)} are needed: "
            "free some, or measure with less data"
        )
    with _signals_raise():
        try:
            made = Path(tempfile.mkdtemp(prefix=".fastserial-bench-", dir=folder))
        except OSError as error:
            raise BenchError(f"{folder} is not writable: {error.strerror}") from error
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn signals that would end the process at once into an exception."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
