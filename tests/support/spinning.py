"""A thread that computes in Python without a pause."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["spinning"]


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Let such a thread run beside the body."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
