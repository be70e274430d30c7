"""Beside a thread that keeps the interpreter's lock, threads take turns more often for a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.spinning import spinning

import fastserial
from fastserial.config.performance import SWITCH_INTERVAL
from fastserial.memory.held_settings import quick_switches
from fastserial.saving.crowding import Crowding
from fastserial.saving.extent_writer import ExtentWriter

MIB = 1024 * 1024
SHORT = pytest.approx(SWITCH_INTERVAL)


@pytest.fixture
def usual() -> Iterator[float]:
    """The interval that the program has set."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


@pytest.fixture
def seen(usual: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The intervals at the blocks of saves."""
    found: list[float] = []
    real = ExtentWriter._advance

    def advance(writer: ExtentWriter, length: int) -> None:
        found.append(sys.getswitchinterval())
        real(writer, length)

    monkeypatch.setattr(ExtentWriter, "_advance", advance)
    fastserial.install()
    yield found
    fastserial.uninstall()


def state() -> dict[str, torch.Tensor]:
    return {name: torch.rand(24 * MIB // 4) for name in "abcd"}


def test_only_in_the_body(usual: float) -> None:
    with pytest.raises(KeyError), quick_switches():
        assert sys.getswitchinterval() == SHORT
        with quick_switches():
            pass
        assert sys.getswitchinterval() == SHORT
        raise KeyError
    assert sys.getswitchinterval() == usual


def test_a_program_that_has_a_shorter_one_keeps_it(usual: float) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL / 2)
    with quick_switches():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL / 2)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL / 2)


def test_it_is_the_same_afterwards_to_the_microsecond(usual: float) -> None:
    for microseconds in range(1, 6000, 7):
        sys.setswitchinterval(microseconds * 1e-6 + 0.1e-6)
        with quick_switches():
            pass
        assert sys.getswitchinterval() == pytest.approx(microseconds * 1e-6)


def test_what_the_program_sets_meanwhile_stays(usual: float) -> None:
    with quick_switches():
        sys.setswitchinterval(0.003)
    assert sys.getswitchinterval() == 0.003


def test_in_a_forked_child_it_is_as_before(usual: float) -> None:
    with quick_switches():
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == usual else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sys.getswitchinterval() == SHORT


def test_a_save_beside_nothing_changes_nothing(
    tmp_path: Path, seen: list[float], usual: float
) -> None:
    torch.save(state(), tmp_path / "state.pt")
    assert set(seen) == {sys.getswitchinterval()}
    assert seen[0] == usual


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")])
def test_a_save_that_finds_itself_crowded(
    tmp_path: Path,
    seen: list[float],
    usual: float,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception | None,
) -> None:
    def saw(crowding: Any, block: Any) -> None:
        blocks.append(block)
        crowding._found |= len(blocks) == 3
        if error is not None and len(blocks) > 9:
            raise error

    blocks: list[Any] = []
    monkeypatch.setattr(Crowding, "saw", saw)
    if error is None:
        obj = state()
        torch.save(obj, tmp_path / "state.pt")
        assert torch.equal(torch.load(tmp_path / "state.pt")["d"], obj["d"])
    else:
        with pytest.raises(OSError, match="the disk is gone"):
            torch.save(state(), tmp_path / "state.pt")
    assert seen[0] == usual
    assert seen[-1] == SHORT
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("snapshot", ["copy", "in_place"])
def test_the_call_of_a_save_in_the_background(tmp_path: Path, usual: float, snapshot: Any) -> None:
    """It pickles, and copies: the threads beside it are held up for less."""

    found: list[float] = []

    class Noting:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[()]]:
            found.append(sys.getswitchinterval())
            return dict, ()

    fastserial.install()
    try:
        state = {"noting": Noting(), "weight": torch.rand(MIB)}
        fastserial.save_async(state, tmp_path / "state.pt", snapshot=snapshot).wait()
    finally:
        fastserial.uninstall()
    assert found == [SHORT]
    assert sys.getswitchinterval() == usual


def test_beside_a_thread_that_spins(tmp_path: Path, usual: float) -> None:
    """Whether or not the save finds itself crowded: afterwards all is as before."""
    obj = state()
    fastserial.install()
    try:
        with spinning():
            torch.save(obj, tmp_path / "state.pt")
    finally:
        fastserial.uninstall()
    assert sys.getswitchinterval() == usual
    assert torch.equal(torch.load(tmp_path / "state.pt")["d"], obj["d"])
