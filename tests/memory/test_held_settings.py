"""A setting of the interpreter that is changed for a time is as before afterwards."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from fastserial.memory import held_settings
from fastserial.memory.held_settings import HeldSetting, Hold


class Case(NamedTuple):
    """A setting, and values that a program may give it."""

    setting: HeldSetting
    get: Callable[[], Any]
    put: Callable[[Any], object]
    usual: Any
    another: Any


def _put_thresholds(value: tuple[int, int, int]) -> None:
    gc.set_threshold(*value)


CASES = {
    "collector": Case(
        held_settings._THRESHOLDS, gc.get_threshold, _put_thresholds, (600, 9, 8), (900, 20, 30)
    ),
    "switch interval": Case(
        held_settings._INTERVAL, sys.getswitchinterval, sys.setswitchinterval, 0.004, 0.003
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = CASES[request.param]
    before = found.get()
    found.put(found.usual)
    yield found
    found.put(before)


def test_many_threads_at_once(case: Case) -> None:
    """None takes what another has set for what the program had."""
    begin = threading.Barrier(4)

    def run() -> None:
        begin.wait()
        for _ in range(3000):
            with case.setting.hold():
                pass

    for _ in range(8):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert case.get() == case.usual


def test_one_begins_while_another_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after the other has set the value: it must not be the one that is set at the end."""
    first, second = case.setting.hold(), case.setting.hold()
    real = case.setting._put
    during: list[Hold] = [second]

    def put(*value: Any) -> None:
        real(*value)
        if during:
            during.pop().begin()

    with monkeypatch.context() as patch:
        patch.setattr(case.setting, "_put", put)
        first.begin()
    assert case.get() != case.usual
    first.end()
    del second
    assert case.get() == case.usual


def test_a_signal_handler_raises_at_any_line(case: Case) -> None:
    """A program keeps the error: the value is as before, but for interrupts of `end` itself."""

    class Interrupt(Exception):
        pass

    interrupted, late = 0, 0
    while True:
        hold, left = case.setting.hold(), [interrupted + 1]

        def trace(frame: Any, event: str, argument: object, left: list[int] = left) -> Any:
            if not frame.f_code.co_filename.endswith("memory/held_settings.py"):
                return None
            left[0] -= event == "line"
            if event == "line" and left[0] == 0:
                raise Interrupt
            return trace

        error: Interrupt | None = None
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with hold:
                pass
        except Interrupt as raised:
            error = raised
        finally:
            sys.settrace(before)
        if error is None:
            break
        interrupted += 1
        if hold._change is not None:
            late += 1
            error = None
        del hold
        assert case.get() == case.usual, interrupted
    assert interrupted > 10
    assert late < interrupted / 4


def test_what_the_program_sets_meanwhile_stays(case: Case) -> None:
    hold = case.setting.hold()
    hold.begin()
    case.put(case.another)
    hold.end()
    assert case.get() == case.another


def test_a_child_is_as_the_program_wants_it(case: Case) -> None:
    def in_child(check: Callable[[], bool]) -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if check() else 1)
        assert os.waitpid(child, 0)[1] == 0

    with case.setting.hold() as hold:

        def child() -> bool:
            if case.get() != case.usual:
                return False
            with case.setting.hold():
                changed = case.get() != case.usual
            case.put(case.another)
            hold.end()  # one of the parent's
            return changed and case.get() == case.another

        in_child(child)
        case.put(case.another)
        in_child(lambda: case.get() == case.another)
    assert case.get() == case.another


def test_thresholds_of_older_objects_may_be_set_in_a_pause() -> None:
    """The first one is put back all the same."""
    before = gc.get_threshold()
    try:
        with held_settings.paused_collection():
            gc.set_threshold(gc.get_threshold()[0], 5, 5)
        assert gc.get_threshold()[0] == before[0]
    finally:
        gc.set_threshold(*before)
