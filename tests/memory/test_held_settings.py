"""A setting of the interpreter that is changed for a time is as before afterwards.

The garbage collector pauses while many objects are made; threads take turns more often while a
save moves blocks.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fastserial
from fastserial.config.performance import SWITCH_INTERVAL
from fastserial.memory import held_settings
from fastserial.memory.held_settings import HeldSetting, paused_collection
from fastserial.progress import ProgressBar


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


def test_only_in_the_body(case: Case) -> None:
    with pytest.raises(KeyError), case.setting.hold():
        changed = case.get()
        with case.setting.hold():
            pass
        assert case.get() == changed != case.usual
        raise KeyError
    assert case.get() == case.usual


def test_it_is_back_when_the_end_is_skipped(case: Case) -> None:
    """As by an interrupt that comes in the first line of `__exit__`."""
    holds = [case.setting.hold(), case.setting.hold()]
    for hold in holds:
        hold.begin()
    holds.pop()
    assert case.get() != case.usual
    holds.pop()
    del hold
    assert case.get() == case.usual


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


# -- the collector -------------------------------------------------------------------------------


def collects() -> bool:
    return gc.isenabled() and 0 < gc.get_threshold()[0] < 100_000


def test_whoever_switched_it_off_keeps_it_off() -> None:
    before = gc.get_threshold()
    try:
        gc.disable()
        with paused_collection():
            pass
        assert not gc.isenabled()
        gc.enable()
        gc.set_threshold(0)
        with paused_collection():
            pass
        assert gc.get_threshold()[0] == 0
    finally:
        gc.enable()
        gc.set_threshold(*before)


class _Watcher:
    """Notes whether cycles are collected while it is pickled and unpickled; fails if told to."""

    seen: list[bool]
    error: Exception | None = None

    def __getstate__(self) -> int:
        _Watcher.seen.append(collects())
        if self.error is not None:
            raise self.error
        return 1

    def __setstate__(self, state: object) -> None:
        _Watcher.seen.append(collects())


def test_saves_and_loads_pause_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    written: list[bool] = []
    watcher = _Watcher()
    _Watcher.seen = []
    state = {"w": watcher, **{str(i): torch.ones(4) for i in range(50)}}
    state["not a small file"] = torch.zeros(9 << 20, dtype=torch.uint8)
    fastserial.install(on_report=lambda report: written.append(collects()))
    try:
        torch.save(state, path)
        assert written == [True]
        torch.load(path, weights_only=False)
        assert collects()
        watcher.error = ValueError("not today")
        with pytest.raises(ValueError, match="not today"):
            torch.save(state, path)
        assert collects()
        with open(path, "r+b") as file:  # an error ends the pause, too
            data = file.read()
            file.seek(data.index(b"_Watcher"))
            file.write(b"\xff" * 4)
        with pytest.raises(UnicodeDecodeError):
            torch.load(path, weights_only=False)
        assert collects()
    finally:
        fastserial.uninstall()
    assert _Watcher.seen == [False, False, False]
    target = {"a": torch.zeros(4)}
    torch.save({"a": torch.ones(4)}, path)
    fastserial.load_into(target, path)
    assert collects()
    assert torch.equal(target["a"], torch.ones(4))


# -- the switch interval -------------------------------------------------------------------------

SHORT = pytest.approx(SWITCH_INTERVAL)


@pytest.fixture
def usual() -> Iterator[float]:
    """The interval that the program has set."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")])
def test_blocks_of_a_save_are_moved_with_the_short_one(
    tmp_path: Path, usual: float, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    seen: list[float] = []

    def advance(bar: ProgressBar, length: int) -> None:
        seen.append(sys.getswitchinterval())
        if error is not None:
            raise error

    monkeypatch.setattr(ProgressBar, "update", advance)
    fastserial.install(small_file=0, block_size=65536)
    try:
        if error is None:
            torch.save(torch.rand(100_000), tmp_path / "state.pt")
        else:
            with pytest.raises(OSError, match="the disk is gone"):
                torch.save(torch.rand(100_000), tmp_path / "state.pt")
    finally:
        fastserial.uninstall()
    assert seen
    assert all(interval == SHORT for interval in seen)
    assert sys.getswitchinterval() == usual
