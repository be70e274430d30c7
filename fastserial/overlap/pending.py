"""Pending saves: one at a time for each target, few in all, and no error is lost.

An error is raised where a caller waits for the save, else at the next save to the same target,
else logged when the interpreter exits. The interpreter does not exit before the saves have ended.

No lock guards the lists of saves: a signal handler that waits for a save could find it held by its
own thread, and the saving thread would wait for it as well. They are changed by single calls of C.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from fastserial.errors import FastserialError
from fastserial.interrupts import Background, ours, suppress
from fastserial.memory.held_settings import Hold, quick_switches
from fastserial.reports import SaveReport

_log = logging.getLogger("fastserial")
_MOST = 2  # one is written, one waits for its turn


class PendingSave(Future[SaveReport]):
    """A save that may still be running: a `Future` of its report, which can be awaited, too.

        saving = fastserial.save_async(state, "ckpt.pt")
        print(saving.done(), saving.result(timeout=60))

    `cancel` has no effect. Callbacks are called on the saving thread.
    """

    def __init__(self, path: str, target: str) -> None:
        """Register a save that has not started.

        Args:
            path: as the user gave it.
            target: the file it leads to.
        """
        super().__init__()
        self.set_running_or_notify_cancel()
        self._path = path
        self._target = target
        self._thread = 0

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._end() else "saved"
        return f"<PendingSave {self._path!r}: {state}>"

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def report(self) -> SaveReport | None:
        """What the save did, once it has succeeded."""
        return super().result() if self.done() and self._end() is None else None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the end of the save, and return its report.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: it has not ended by then. It continues.
            WriteError: the file could not be written.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()

    wait = result

    def __await__(self) -> Generator[Any, None, SaveReport]:
        """Let other tasks of the event loop run until the save ends; raise and return as `wait`."""
        import asyncio  # slow to import; who awaits has imported it

        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()  # cancelling the task does not cancel it
        self.add_done_callback(lambda _: ended.set_result(None))
        yield from asyncio.wrap_future(ended)
        return self.result()  # here: a task that was cancelled has not seen the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save, and return the error that ended it, or None.

        Raises:
            TimeoutError: it has not ended after so many seconds. It continues.
        """
        if self._thread == threading.get_ident() and not self.done():
            raise FastserialError(f"{self._path}: a save cannot wait for itself")
        error = self._end(timeout)
        _drop(_failed, self)
        return error

    def _end(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; its error still counts as one that no caller has seen."""
        try:
            return super().exception(timeout)
        except ours(FutureTimeoutError):  # before Python 3.11 no builtin
            raise TimeoutError(f"{self._path}: not saved within {timeout} seconds") from None


_pending: list[PendingSave] = []  # in the order of the calls
_failed: list[PendingSave] = []  # whose errors no caller has seen


def wait_all() -> None:
    """Wait for all pending saves.

        fastserial.save_async(state, "ckpt.pt")
        fastserial.wait_all()

    Raises:
        Exception: the error of one that failed, if no caller has seen it; the next call raises
            the next one.
    """
    while waiting := list(_pending):
        for save in waiting:
            save._end()
    for failed in _failed:
        failed.wait()


def admit(target: str) -> None:
    """Wait until a save to a target may start.

    Raises:
        Exception: the error of the last save to this target, if no caller has seen it.
    """
    if _is_saving():
        return
    while before := _blocking_save(target):
        before._end()
    for failed in _failed:
        if failed._target == target:
            failed.wait()


def _blocking_save(target: str) -> PendingSave | None:
    """Return a save that has to end before one to the target may start."""
    saves = list(_pending)
    oldest = saves[0] if len(saves) >= _MOST else None
    return next((save for save in saves if save._target == target), oldest)


def run_in_background(
    save: PendingSave,
    work: Callable[[], SaveReport],
    first: Callable[[], object] = bool,
) -> bool:
    """Do the work of a save on a thread, after those before it; False if no thread can start.

    The interpreter waits for such threads when it exits, also after an uncaught exception.

    Args:
        first: called before the thread starts.
    """
    run = contextvars.copy_context().run
    started: list[bool] = []

    def start() -> None:
        _pending.append(save)
        saves = list(_pending)
        before = saves[: saves.index(save)]
        first()
        name = f"fastserial: {save.path}"
        turns = quick_switches()
        turns.begin()  # what holds in the call holds in the thread, without a gap
        arguments = (_run, save, work, before, turns)
        thread = threading.Thread(target=run, args=arguments, name=name)
        thread.daemon = False
        try:
            thread.start()
        except ours(RuntimeError):  # a limit on threads
            turns.end()
            _drop(_pending, save)
        else:
            started.append(True)

    starter = Background()  # a signal handler cannot interrupt it
    # When the interpreter exits, nobody waits for a new thread.
    if threading.main_thread().is_alive() and not _is_saving() and starter.start(start):
        starter.join()
    return bool(started)


def _is_saving() -> bool:
    """Return whether the calling thread is a saving one: `on_report` may save, too."""
    me = threading.get_ident()
    return any(save._thread == me for save in list(_pending))


def run_at_once(path: str, target: str, work: Callable[[], SaveReport]) -> PendingSave:
    """Do the work of a save on the calling thread.

    Raises:
        Exception: it failed.
    """
    save = PendingSave(path, target)
    _pending.append(save)  # if the process ends meanwhile (this is a daemon thread), it is logged
    _run(save, work)
    save.wait()
    return save


def _run(
    save: PendingSave,
    work: Callable[[], SaveReport],
    before: Sequence[PendingSave] = (),
    turns: Hold | None = None,
) -> None:
    """Do the work of a save, after those before it."""
    save._thread = threading.get_ident()
    for earlier in before:
        earlier._end()
    report: SaveReport | None = None
    error: BaseException | None = None
    try:
        report = work()
    except BaseException as found:
        error = found
    finally:
        del work
        if turns is not None:
            turns.end()
        if error is not None:
            _forget_frames(error)
            _failed.append(save)
        _drop(_pending, save)
        if report is not None:
            save.set_result(report)
        else:
            save.set_exception(error)
        del error


def _drop(saves: list[PendingSave], save: PendingSave) -> None:
    with suppress(ValueError):
        saves.remove(save)


def _forget_frames(error: BaseException | None) -> None:
    """Drop what an error's tracebacks hold: a kept error would keep the state."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _at_exit() -> None:
    """Log what was not saved and no caller has asked about."""
    for save in _pending:
        _log.error("%s: the process ends before it was saved; given up", save.path)
    for save in _failed:
        _log.error("%s: it was not saved: %s", save.path, save._end())


def _in_child() -> None:
    """End the parent's pending saves in a forked child: nothing here waits for them."""
    for save in _pending:
        PendingSave.__init__(save, save._path, save._target)  # another thread may hold its lock
        save.set_exception(FastserialError(f"{save.path}: this save is the parent process's"))
    _pending.clear()
    _failed.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
