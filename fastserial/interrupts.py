"""Descriptors, threads and clean-up that survive exceptions of signal handlers.

A signal handler runs in the main thread after any call, and may raise there. So

- a resource is acquired and recorded in one call (of C: no handler runs inside), and released so;
- it belongs to an object that releases it when no reference to it is left, in C as well, should the
  clean-up be skipped;
- clean-up continues where it was interrupted, and the interrupt is raised when all is done;
- work on other threads cannot be interrupted.

Rejected: to do all work of a save on another thread, which no handler interrupts. Small saves would
take longer, file objects belong to the caller's thread, a caller that was interrupted may hold a
lock that the work needs, and a process may be unable to start a thread.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import operator
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import repeat
from traceback import walk_tb

from fastserial.errors import FastserialError

OWN = os.O_ASYNC  # means nothing where a regular file is opened: our own descriptors have it
_BOTTOM = -1  # of a list of descriptors
_TRIES = 100  # a step that fails so often will not end


def finish(*steps: Callable[[], object]) -> None:
    """Complete all steps, then raise the first error, if any.

    Args:
        steps: called again after an error; each must continue where it was.

    Raises:
        BaseException: an error of a step, or whatever a signal handler raised during them.
    """
    first: BaseException | None = None
    for step in steps:
        for _ in range(_TRIES):
            try:
                step()
                break
            except BaseException as error:
                first = first or error
    try:
        if first is not None:
            raise first
    finally:
        first = None  # or it would keep this frame, and this frame it


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error.

    Its traceback has a frame of a handler; or it is an `OSError` that is neither ours nor a system
    call's, which sets `errno`: `raise TimeoutError` does not.
    """
    handlers = {getattr(signal.getsignal(one), "__code__", None) for one in signal.valid_signals()}
    if any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__)):
        return True
    if not isinstance(error, OSError) or isinstance(error, FastserialError):
        return False
    return error.errno is None


class Descriptors:
    """Descriptors that are open: closed by `close`, or when no reference to this is left."""

    __slots__ = ("__weakref__", "_fds", "_free")

    def __init__(self) -> None:
        self._fds: list[int] = [_BOTTOM]
        self._free: Callable[[], object] = partial(
            deque, map(os.close, iter(self._fds.pop, _BOTTOM)), 0
        )

    # No handler runs before it is done: there is no function of Python's in it.
    __del__ = property(operator.attrgetter("_free"))

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(
        self,
        path: str | os.PathLike[str],
        flags: int,
        mode: int = 0o666,
        dir_fd: int | None = None,
    ) -> int:
        """Return a new descriptor, as `os.open`; saves do not take it for one of the program's.

        Raises:
            OSError: it cannot be opened.
        """
        call = os.open if dir_fd is None else partial(os.open, dir_fd=dir_fd)
        flags |= os.O_CLOEXEC
        try:
            self._fds.extend(map(call, (path,), (flags | OWN,), (mode,)))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # a FUSE file system may refuse flags that it does not know
            self._fds.extend(map(call, (path,), (flags,), (mode,)))
        return self._fds[-1]

    def reopen_plain(self, fd: int, flags: int) -> int:
        """Return a new descriptor of an open file, without our mark, for code that checks flags.

        Raises:
            OSError: it cannot be opened.
        """
        names = (f"/proc/self/fd/{fd}",)
        self._fds.extend(map(os.open, names, (flags | os.O_CLOEXEC,)))
        return self._fds[-1]

    def duplicate(self, fd: int) -> int:
        """Return a copy of a descriptor.

        Raises:
            OSError: it is not open, or no descriptor is left.
        """
        self._fds.extend(map(os.dup, (fd,)))
        return self._fds[-1]

    @property
    def newest(self) -> int:
        """The one opened last; -1 if none is open."""
        return self._fds[-1]

    def close(self, but: int = 0) -> None:
        """Close them all but the first `but`, the last one first. Idempotent."""
        while (count := len(self._fds) - 1 - but) > 0:
            try:
                deque(map(os.close, map(self._fds.pop, repeat(-1, count))), 0)
            except OSError:  # it is closed all the same
                continue

    def close_newest(self) -> None:
        """Close the one opened last.

        Raises:
            OSError: a network file system reports a late error; it is closed all the same.
        """
        deque(map(os.close, map(self._fds.pop, (-1,))), 0)


class Background:
    """Threads that can be started, and waited for, where signal handlers raise.

    Those of `threading` cannot: an interrupted `start` leaves the thread in tables forever, and
    an interrupted `join` takes it for ended.
    """

    __slots__ = ("_pid", "_started")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._started: list[tuple[int, threading.Lock]] = []  # each with what it holds till its end

    def __len__(self) -> int:
        """Return how many were started."""
        return len(self._started)

    def start(self, run: Callable[..., object], *arguments: object) -> bool:
        """Run a function in a thread of its own; False if no thread can be started."""
        if sys.is_finalizing():  # it would never run; up to Python 3.11 there is no error
            return False
        end = threading.Lock()
        end.acquire()
        thread = map(_thread.start_new_thread, (_run,), ((end, run, arguments),))
        try:
            self._started.extend(zip(thread, (end,), strict=False))
        except RuntimeError:  # a limit on threads, or the interpreter is shutting down
            return False
        return True

    def join(self) -> None:
        """Wait until all have ended, but for the calling one; again, if interrupted."""
        if sys.is_finalizing() or os.getpid() != self._pid:
            return  # the threads do not exist any more, and never ended
        for thread in tuple(self._started):
            if thread[0] == _thread.get_ident():
                continue
            with thread[1]:
                pass
            with contextlib.suppress(ValueError):
                self._started.remove(thread)


def _run(end: threading.Lock, run: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        run(*arguments)
    finally:
        del run, arguments  # what they hold is gone when the end is seen
        end.release()
