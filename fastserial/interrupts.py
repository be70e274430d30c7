"""What makes saves and loads safe where signal handlers raise: in any line, any exception.

A signal handler runs in the main thread after any call, and may raise there. So

- a resource is acquired and recorded in one call (of C: no handler runs inside), and released so;
- it belongs to an object that releases it when no reference to it is left, in C as well, should the
  clean-up be skipped;
- clean-up continues where it was interrupted, and the first error is raised when all is done;
- an error is handled only if no handler raised it: `except ours(OSError)`, `suppress(OSError)`;
- work on other threads cannot be interrupted.

All of the package relies on the following of CPython; `tests/test_interrupts.py` checks it on the
Python that runs the tests.

1. Handlers run in the main thread only, and only where the interpreter looks for signals: where a
   function begins (`RESUME`), in a loop's jump back (`JUMP_BACKWARD`; `JUMP_ABSOLUTE` up to 3.10),
   after a call (`CALL` and its kin), and in calls of C that wait.
2. A call of C that only calls C (`list.extend(map(os.open, ...))`, `deque(map(os.close, ...))`)
   is one step: a handler runs before or after it. Its result may be lost after it, before it is
   stored in a variable: what it acquired has to be recorded inside.
3. Between the last instruction of a `try` or `with` block and the first call of its `finally`, its
   `except` or its `__exit__`, there is no look for signals; if that call is one of C, it happens.
4. Between the `__enter__` of a `with` statement and its block there is one in 3.14, not before and
   not in 3.15: `__exit__` is then not called. So `with lock:` may leave a lock of `threading`
   locked. `Locked` does not.
5. A deallocated object runs no handler if its `__del__` is a property whose value is a function of
   C: there is no function of Python's in it.
6. Python calls a handler with the frame that it interrupts as an argument. No other function is
   called with a frame while the package works, so a traceback shows who raised (`is_foreign`).

Rejected: to do all work of a save on another thread, which no handler interrupts. Small saves would
take longer, file objects belong to the caller's thread, a caller that was interrupted may hold a
lock that the work needs, and a process may be unable to start a thread. Rejected, too: to catch
errors only around the system calls themselves. A handler runs in these, as well.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import inspect
import io
import operator
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import compress, repeat
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import TypeVar

from fastserial.errors import FastserialError

OWN = os.O_ASYNC  # means nothing where a regular file is opened: our own descriptors have it
_BOTTOM = -1  # of a list of descriptors
_close = ctypes.CDLL(None).close  # raises nothing: the others are closed, too
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


def finish_after(error: BaseException | None, *steps: Callable[[], object]) -> None:
    """Complete all steps of a clean-up after an error, which the caller raises then.

        except BaseException as error:
            finish_after(error, self.close)
            raise

    The first error of the steps becomes its context.

    Args:
        error: what happened before; None: nothing.
        steps: as for `finish`.

    Raises:
        BaseException: an error of a step, if none came before; or a step was interrupted (by
            Ctrl-C), and the error before is no interrupt.
    """
    try:
        finish(*steps)
    except BaseException as another:
        if error is None or (isinstance(error, Exception) and not isinstance(another, Exception)):
            raise
        if another is not error:
            _chain(error, another)
    finally:
        error = None  # or it would keep this frame, and this frame it


def _chain(error: BaseException, another: BaseException) -> None:
    """Put an error, and what it was raised in, before the context of the first one."""
    last = another
    while last.__context__ is not None and last.__context__ is not error:
        last = last.__context__
    last.__context__ = error.__context__
    error.__context__ = another


class cleanup:
    """Completes steps when a block is left, as `finish_after` the error of the block.

    with cleanup(source.close):
        ...
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        finish_after(error, *self._steps)


# -- whose error it is ---------------------------------------------------------------------------

_PACKAGE = __name__.partition(".")[0]
_Error = TypeVar("_Error", bound=BaseException)


def is_foreign(error: BaseException) -> bool:
    """Return whether a signal handler raised an error, or another thread did so in this one.

    Its traceback has the frame of a handler; or it is an `OSError` without arguments from a line of
    ours: no function of C raises such a one.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if len(frames) > 1:  # else a function of C raised it
        handlers = _handlers()
        if any(frame.f_code in handlers or _has_frame(frame) for frame in frames[1:]):
            return True
    if not isinstance(error, OSError) or isinstance(error, FastserialError) or not frames:
        return False
    name = str(frames[-1].f_globals.get("__name__"))
    return not error.args and name.partition(".")[0] == _PACKAGE


def _handlers() -> set[object]:
    """Return the code of the handlers that are functions."""
    return {getattr(signal.getsignal(one), "__code__", None) for one in signal.valid_signals()}


def _has_frame(frame: FrameType) -> bool:
    """Return whether a function was called with a frame."""
    code, known = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    if code.co_flags & inspect.CO_VARARGS:
        count += 1
    for name in code.co_varnames[:count]:
        value = known.get(name)
        values = value if type(value) is tuple else (value,)
        if any(type(one) is FrameType for one in values):
            return True
    return False


def ours(*kinds: type[_Error]) -> tuple[type[_Error], ...]:
    """Return the classes for an `except` clause, none if a signal handler raised the error.

    try:
        os.unlink(name)
    except ours(OSError) as error:
        ...
    """
    error = sys.exc_info()[1]  # which the clause is asked for
    return () if error is not None and is_foreign(error) else kinds


class suppress(contextlib.suppress):
    """As `contextlib.suppress`; errors of signal handlers are raised."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None and is_foreign(error):
            return False
        return bool(super().__exit__(kind, error, trace))


# -- locks, descriptors, threads -----------------------------------------------------------------

_acquire = operator.methodcaller("acquire")
_release = operator.methodcaller("release")


class Locked(io.IOBase):
    """Holds a lock in a `with` block, which no signal handler can leave locked.

        with Locked(self._lock):
            ...

    To acquire and to record it is one call of C, and so is the release, at the end of the block or
    when no reference to this is left. `io.IOBase` is a class of C whose `__exit__` and finalizer
    call `close`.
    """

    _free: Callable[[], object] = bool  # which does nothing: until there is something to release

    def __init__(self, lock: object) -> None:
        held: list[object] = [None]
        once = (lock,)
        self._take: Callable[[], object] = partial(held.extend, compress(once, map(_acquire, once)))
        self._free = partial(next, map(_release, iter(held.pop, None)), None)

    __enter__ = property(operator.attrgetter("_take"))
    close = property(operator.attrgetter("_free"))


class Descriptors:
    """Descriptors that are open: closed by `close`, or when no reference to this is left."""

    __slots__ = ("__weakref__", "_fds", "_free")

    def __init__(self) -> None:
        self._fds: list[int] = [_BOTTOM]
        self._free: Callable[[], object] = partial(
            deque, map(_close, iter(self._fds.pop, _BOTTOM)), 0
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
        except ours(OSError) as error:
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
            except ours(OSError):  # it is closed all the same
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
        except ours(RuntimeError):  # a limit on threads, or the interpreter is shutting down
            return False
        return True

    def join(self) -> None:
        """Wait until all have ended, but for the calling one; again, if interrupted."""
        if sys.is_finalizing() or os.getpid() != self._pid:
            return  # the threads do not exist any more, and never ended
        for thread in tuple(self._started):
            if thread[0] == _thread.get_ident():
                continue
            with Locked(thread[1]):
                pass
            with suppress(ValueError):
                self._started.remove(thread)


def _run(end: threading.Lock, run: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        run(*arguments)
    finally:
        del run, arguments  # what they hold is gone when the end is seen
        end.release()
