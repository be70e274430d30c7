"""Saves under way: one at a time for each target, few in all, and no error is lost.

An error is raised where somebody waits for the save, else at the next save to the same target,
else logged when the interpreter exits. It does not exit before the saves have ended.

There is no lock: a signal handler that waits for a save could find it taken by its own thread, and
the thread that saves would wait for it, too. Lists are changed by single calls of C instead.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import os
import threading
import traceback
from collections.abc import Callable, Generator
from typing import Any

from fastserial.errors import FastserialError
from fastserial.interrupts import Background
from fastserial.memory.held_settings import Hold, quick_switches
from fastserial.overlap import guard
from fastserial.overlap.snapshot import Snapshot
from fastserial.overlap.threads_at import at_rest
from fastserial.reports import SaveReport

__all__ = ["PendingSave", "admit", "finished", "run_beside", "wait_all"]

_log = logging.getLogger("fastserial")
_MOST = 2  # one is written, one waits for its turn


class PendingSave:
    """A save that may still be under way.

    It has a `concurrent.futures.Future`'s methods, but none to cancel it, and `await` works on it.
    """

    def __init__(self, path: str, target: str, snapshot: Snapshot | None = None) -> None:
        """Note a save to come.

        Args:
            path: as the user gave it.
            target: the file it leads to.
            snapshot: what it saves, as long as that is not taken.
        """
        self._path = path
        self._target = target
        self._snapshot = snapshot
        self._end = threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._thread = 0
        self._callbacks: list[Callable[[PendingSave], object]] = []

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error else "saved"
        return f"<PendingSave {self._path!r}: {state}>"

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def report(self) -> SaveReport | None:
        """What the save did, once it has ended well."""
        return self._report

    def done(self) -> bool:
        """Tell whether the save has ended, well or not."""
        return self._end.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Wait for the end of the save, and return its report.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: it has not ended by then. It goes on.
            TornSnapshotError: what was saved in place was changed meanwhile.
            WriteError: the file could not be written.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        if self._report is None:
            raise FastserialError(f"{self._path}: the save has ended without a report")
        return self._report

    result = wait

    def __await__(self) -> Generator[Any, None, SaveReport]:
        """Let other tasks of the event loop run until the save ends; raise and return as `wait`."""
        import asyncio  # whoever needs it has it by now

        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not end.done():  # its task may be cancelled
                end.set_result(None)

        def ended(_: PendingSave) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(ended)
        yield from end
        return self.wait()

    def add_done_callback(self, function: Callable[[PendingSave], object]) -> None:
        """Call a function with this object when the save has ended, at once if it has.

        It is called on the thread that saves. What it raises is logged.
        """
        self._callbacks.append(function)
        if self.done():
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                function = self._callbacks.pop(0)
            except IndexError:  # another thread has just taken it
                break
            try:
                function(self)
            except Exception:
                _log.exception("%s: a function that is called after the save failed", self._path)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save, and return the error that ended it, or None.

        Raises:
            TimeoutError: it has not ended after so many seconds. It goes on.
        """
        if self._thread == threading.get_ident() and not self.done():
            raise FastserialError(f"{self._path}: a save cannot wait for itself")
        with at_rest():
            if not self._end.wait(timeout):
                raise TimeoutError(f"{self._path}: not saved within {timeout} seconds")
        _drop(_failed, self)
        return self._error

    def wait_snapshot(self, timeout: float | None = None) -> None:
        """Return when what is saved may be changed: all of it is written, or copied now.

        Optimizers do it by themselves before a step. Call it before other changes in place.

        Raises:
            TimeoutError: that was not so after so many seconds.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return
        if timeout is None:
            snapshot.release()
        elif not snapshot.wait(timeout):
            raise TimeoutError(f"{self._path}: not all bytes taken within {timeout} seconds")

    def _finish(self, report: SaveReport | None, error: BaseException | None) -> None:
        self._report = report
        self._error = error
        self._snapshot = None
        if error is not None:
            _forget_frames(error)
            _failed.append(self)
        _drop(_pending, self)
        self._end.set()
        self._call_back()


_pending: list[PendingSave] = []  # in the order of the calls
_failed: list[PendingSave] = []  # whose errors nobody has seen


def wait_all() -> None:
    """Wait for all saves under way.

    Raises:
        Exception: the error of one that failed, and that nobody has seen; the next call raises
            the next one.
    """
    while waiting := list(_pending):
        for save in waiting:
            with at_rest():
                save._end.wait()
    for failed in _failed:
        failed.wait()


def admit(target: str) -> None:
    """Wait until a save to a target may start.

    Raises:
        Exception: the error of the last save to this target, if nobody has seen it.
    """
    if _is_saving():
        return
    while before := _in_the_way(target):
        with at_rest():
            before._end.wait()
    for failed in _failed:
        if failed._target == target:
            failed.wait()


def _in_the_way(target: str) -> PendingSave | None:
    """Return a save that has to end before one to the target may start."""
    saves = list(_pending)
    oldest = saves[0] if len(saves) >= _MOST else None
    return next((save for save in saves if save._target == target), oldest)


def run_beside(
    save: PendingSave,
    work: Callable[[], SaveReport],
    taken: Snapshot,
    first: Callable[[], object] = bool,
) -> bool:
    """Do the work of a save on a thread, after those before it; False if no thread can start.

    The interpreter waits for such threads when it exits, also after an uncaught exception.

    Args:
        taken: what is saved; optimizers wait for it if it is read in place.
        first: called before the thread starts.
    """
    in_place = taken.kind == "in_place"
    if not threading.main_thread().is_alive() or _is_saving():  # nobody waits for it
        taken.kind = "blocking"
        return False
    run = contextvars.copy_context().run
    started: list[bool] = []

    def start() -> None:
        _pending.append(save)
        saves = list(_pending)
        before = saves[: saves.index(save)]
        first()
        if in_place:
            guard.protect(taken)
        name = f"fastserial: {save.path}"
        turns = quick_switches()
        turns.begin()  # the thread goes on with what holds in the call: no gap
        arguments = (_run, save, work, before, turns)
        thread = threading.Thread(target=run, args=arguments, name=name)
        thread.daemon = False
        try:
            thread.start()
        except RuntimeError:  # a limit on threads
            turns.end()
            taken.kind = "blocking"
            _drop(_pending, save)
        else:
            started.append(True)

    starter = Background()  # no signal handler cuts it off halfway
    if not starter.start(start):
        taken.kind = "blocking"
        return False
    starter.join()
    return bool(started)


def _is_saving() -> bool:
    """Tell whether the calling thread is one that saves: `on_report` may save, too."""
    me = threading.get_ident()
    return any(save._thread == me for save in list(_pending))


def finished(path: str, target: str, work: Callable[[], SaveReport]) -> PendingSave:
    """Do the work of a save here and now.

    Raises:
        Exception: it failed.
    """
    save = PendingSave(path, target)
    save._thread = threading.get_ident()
    _pending.append(save)  # should the process end meanwhile (this is a daemon thread): it is told
    try:
        save._report = work()
    finally:
        _drop(_pending, save)
        save._end.set()
    return save


def _run(
    save: PendingSave, work: Callable[[], SaveReport], before: list[PendingSave], turns: Hold
) -> None:
    save._thread = threading.get_ident()
    while before:
        before.pop(0)._end.wait()
    report: SaveReport | None = None
    error: BaseException | None = None
    try:
        report = work()
    except BaseException as found:
        error = found
    finally:
        del work
        turns.end()
        save._finish(report, error)
        del error


def _drop(saves: list[PendingSave], save: PendingSave) -> None:
    with contextlib.suppress(ValueError):
        saves.remove(save)


def _forget_frames(error: BaseException | None) -> None:
    """Drop what an error's tracebacks hold: the error may be kept for long, and that is a state."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _at_exit() -> None:
    """Tell what was not saved, where nobody asked."""
    for save in _pending:
        _log.error("%s: the process ends before it was saved; given up", save.path)
    for save in _failed:
        _log.error("%s: it was not saved: %s", save.path, save._error)


def _in_child() -> None:
    """What is pending is the parent's: nothing here waits for it."""
    for save in _pending:
        save._end = threading.Event()
        save._snapshot = None
        save._callbacks.clear()
        save._error = FastserialError(f"{save.path}: this save is the parent process's")
        save._end.set()
    _pending.clear()
    _failed.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
