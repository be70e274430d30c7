"""Signal handlers, interrupts and the end of the interpreter: no hang, and nothing is left."""

from __future__ import annotations

import _thread
import ast
import dis
import errno
import operator
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.others import in_child
from support.processes import run

import fastserial
from fastserial.engines.deepspeed import aio_op, engine
from fastserial.errors import StorageChangedError
from fastserial.interrupts import (
    Descriptors,
    Locked,
    cleanup,
    finish,
    finish_after,
    is_foreign,
    ours,
    suppress,
)
from fastserial.patching import install
from fastserial.training.folder import CheckpointFolder, Retention
from fastserial.training.mirror import Mirror


@pytest.mark.parametrize("what", ["save", "load", "half"])
def test_while_the_interpreter_shuts_down(what: str, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    if what == "load":
        torch.save({str(i): torch.full((100_000,), float(i)) for i in range(10)}, path)
    ended = run("at_exit", path, what, "fast", code=1, timeout=100)
    assert "the trainer lives on" in ended.err
    if what == "half":  # what its threads had begun is lost; that is told
        assert "shutting down" in ended.err or path.read_bytes() == bytes(2_000_000)
        return
    assert ended.out == "done\n", ended.err
    if what == "save":
        again = tmp_path / "stock" / "f.pt"
        again.parent.mkdir()
        assert run("at_exit", again, what, "stock", code=1).out == "done\n"
        assert len(torch.load(path)) == 10
        assert path.read_bytes() == again.read_bytes()


def test_descriptors_that_nobody_refers_to_are_all_closed() -> None:
    """Also where one is not open any more, or a network file system fails at the close."""
    files = Descriptors()
    fds = [files.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    os.close(fds[1])
    del files
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("of", ["deepspeed", "aio_op", "install", "mirror"])
def test_no_lock_of_a_thread_is_held_in_a_forked_child(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would release it there."""
    monkeypatch.setattr("fastserial.training.mirror.remote_folder", lambda *_, **__: None)
    folder = CheckpointFolder(str(tmp_path), "{step}.pt")
    mirror = Mirror("s3://none", folder, Retention(1), None, 1)
    owner: Any = {"deepspeed": engine, "aio_op": aio_op, "install": install, "mirror": mirror}[of]
    holding, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with owner._lock:
            holding.set()
            forked.wait(60)

    def is_free() -> bool:
        return bool(owner._lock.acquire(blocking=False))

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)
    try:
        assert not is_free()
        assert in_child(is_free)
    finally:
        forked.set()
        thread.join()


def test_clean_up_goes_on_where_it_was_interrupted() -> None:
    done: list[int] = []
    interrupts = [KeyboardInterrupt("first"), OSError("second"), None, KeyboardInterrupt("third")]

    def step() -> None:
        error = interrupts.pop(0) if interrupts else None
        if error is not None:
            raise error
        done.append(1)

    with pytest.raises(KeyboardInterrupt, match="first"):
        finish(step, step, lambda: done.append(2))
    assert done == [1, 1, 2]


# -- errors that are not ours --------------------------------------------------------------------


def alarmed(error: BaseException, handler: Callable[[object], object] | None = None) -> None:
    """Run a handler that raises an error, at the end of this call."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, handler or leave)  # type: ignore[arg-type]
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        list(map(str, range(10)))
    finally:
        signal.signal(signal.SIGUSR1, before)  # it is not known any more when the error is caught


class Alarm:
    """A handler that is an object."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize("kind", ["function", "object", "partial"])
@pytest.mark.parametrize("error", [TimeoutError(), OSError(errno.EIO, "?"), ValueError(1)])
def test_a_handlers_error_passes(error: Exception, kind: str) -> None:
    def leave(what: Exception, *_: object) -> None:
        raise what

    handlers = {"function": None, "object": Alarm(error), "partial": partial(leave, error)}
    with pytest.raises(type(error)) as caught:
        try:
            alarmed(error, handlers[kind])
        except ours(OSError, ValueError):
            pytest.fail("it was taken for one of a call")
    assert caught.value is error
    assert is_foreign(error)
    with pytest.raises(type(error)), suppress(Exception):
        alarmed(error, handlers[kind])


def test_a_calls_error_does_not() -> None:
    with suppress(FileNotFoundError):
        os.stat("/nowhere")
    with pytest.raises(FileNotFoundError):
        try:
            os.stat("/nowhere")
        except ours(FileExistsError):
            pass
    with pytest.raises(OSError, match="nowhere") as caught:
        os.makedirs("/proc/nowhere/else")  # by functions of Python's
    assert not is_foreign(caught.value)


ROOMS = Path(fastserial.__file__).parent
# Where no program runs with its handlers, and what only warns.
ELSEWHERE = {"bench", "cli", "diagnosis", "config", "startup.py", "interrupts.py"}
PATCHING = {"install.py", "maintain.py", "patches.py", "aio_op.py"}
# What no handler raises, or is raised and caught in a few lines.
PRIVATE = {"ImportError", "ModuleNotFoundError", "AttributeError", "TypeError", "CannotReplace",
           "StopIteration", "queue.Empty", "_OnlyForTorchError", "UnicodeEncodeError",
           "BaseException"}  # fmt: skip


def clauses(tree: ast.AST) -> Iterator[ast.ExceptHandler]:
    """Yield the clauses that may end an error, and name it themselves."""
    for clause in ast.walk(tree):
        if isinstance(clause, ast.ExceptHandler) and clause.type is not None:
            inside = [node for line in clause.body for node in ast.walk(line)]
            leaves = any(isinstance(node, ast.Return | ast.Continue) for node in inside)
            last = clause.body[-1]
            if leaves or not isinstance(last, ast.Raise) or last.exc is not None:
                yield clause


def test_every_clause_asks_whose_error_it_is() -> None:
    wrong, seen = [], 0
    for path in ROOMS.rglob("*.py"):
        if path.relative_to(ROOMS).parts[0] in ELSEWHERE or path.name in PATCHING:
            continue
        for clause in clauses(ast.parse(path.read_text())):
            named = ast.unparse(clause.type) if clause.type is not None else ""
            seen += named.startswith("ours(")
            if not named.startswith("ours(") and not set(named.strip("()").split(", ")) <= PRIVATE:
                wrong.append(f"{path.relative_to(ROOMS)}:{clause.lineno} except {named}")
    assert wrong == []
    assert seen > 100


# -- the first error -----------------------------------------------------------------------------


def test_an_error_of_the_clean_up_is_the_context_of_the_first() -> None:
    first, second = StorageChangedError(), OSError(errno.EIO, "a late one")

    def fail() -> None:
        raise second

    with pytest.raises(StorageChangedError) as caught, cleanup(fail):
        try:
            raise KeyError
        except KeyError as cause:
            raise first from cause
    assert caught.value is first
    assert first.__context__ is second
    assert isinstance(second.__context__, KeyError)
    with pytest.raises(OSError, match="a late one"), cleanup(fail):
        pass


def test_an_interrupt_of_the_clean_up_is_not_lost() -> None:
    interrupts = [KeyboardInterrupt()]

    def step() -> None:
        if interrupts:
            raise interrupts.pop()

    with pytest.raises(KeyboardInterrupt):
        finish_after(ValueError(), step)
    other = SystemExit()
    interrupts.append(KeyboardInterrupt())
    finish_after(other, step)  # the caller raises it
    assert isinstance(other.__context__, KeyboardInterrupt)


# -- what `interrupts` relies on in CPython, by its numbers there --------------------------------

_call = operator.methodcaller("__call__")
_alarm = partial(_thread.interrupt_main, signal.SIGUSR1)  # `os.kill` looks for signals itself


@pytest.fixture
def alarms() -> Iterator[None]:
    def leave(number: int, frame: FrameType | None) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, leave)
    yield
    signal.signal(signal.SIGUSR1, before)


class Noisy:
    """A lock of C that is acquired with a signal pending: what it calls it calls in one step."""

    __enter__ = property(operator.attrgetter("acquire"))
    __exit__ = property(operator.attrgetter("leave"))

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.acquire = partial(any, map(_call, (_alarm, self.lock.acquire)))
        self.release, self.leave = self.lock.release, self.lock.__exit__


def test_a_call_of_c_is_one_step(alarms: None) -> None:  # 2
    held: list[object] = []
    with pytest.raises(InterruptedError):
        held.extend(map(_call, (_alarm, threading.Lock)))
    assert len(held) == 2
    with pytest.raises(InterruptedError):
        deque(map(_call, (_alarm, held.clear)), 0)
    assert held == []


def test_a_with_statement_may_leave_a_lock_locked_in_3_14(alarms: None) -> None:  # 4
    plain, ours_ = Noisy(), Noisy()
    with pytest.raises(InterruptedError), plain:
        str(1)
    assert plain.lock.locked() == (sys.version_info[:2] == (3, 14))
    with pytest.raises(InterruptedError), Locked(ours_):
        str(1)
    assert not ours_.lock.locked()


def test_a_lock_is_free_once_nobody_refers_to_its_holder(alarms: None) -> None:  # 5
    lock = threading.Lock()
    holder = Locked(lock)
    holder.__enter__()
    assert lock.locked()
    del holder
    assert not lock.locked()
    Locked.__new__(Locked).close()  # interrupted before it has anything to release


def _releases(lock: threading.Lock, work: Callable[[], object]) -> None:
    try:
        work()
    finally:
        lock.release()


def _leaves(lock: threading.Lock, work: Callable[[], object]) -> None:
    with lock:
        work()


@pytest.mark.parametrize("function", [_releases, _leaves])
def test_nothing_looks_for_signals_before_the_clean_up(
    function: Callable[..., object],
) -> None:  # 1, 3
    looks = ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "CALL", "SEND", "YIELD", "FOR_ITER")
    names = [one.opname for one in dis.get_instructions(function)]
    calls = [i for i, name in enumerate(names) if name.startswith(("CALL", "WITH_EXCEPT_START"))]
    body = 1 if function is _leaves and sys.version_info >= (3, 14) else 0  # after `__enter__`
    between = names[calls[body] + 1 : calls[body + 1]]
    assert not [name for name in between if name.startswith(looks)], names
