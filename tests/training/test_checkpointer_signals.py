"""Checkpointer and signals: a loop that one ends has its checkpoint, and nothing else changes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserial import Checkpointer


class Counted:
    """A state that is a number, and sends a signal while a certain one is saved."""

    step = signal_at = 0

    def state_dict(self) -> dict[str, int]:
        if self.step == self.signal_at:
            signal.raise_signal(signal.SIGTERM)
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize("comes", ["before the save", "in it", "after it"])
@pytest.mark.parametrize("looks", ["after the save", "before the next step", "before the save"])
@pytest.mark.parametrize("every", [1, 100])
def test_the_loop_ends_with_its_checkpoint(
    tmp_path: Path, comes: str, looks: str, every: int
) -> None:
    state = Counted()
    with Checkpointer(tmp_path, {"it": state}, every=every) as checkpointer:
        checkpointer.save_on(signal.SIGTERM)
        for step in range(1, 8):
            if looks == "before the next step" and checkpointer.stop_requested:
                break
            state.step = step
            if step == 3 and comes == "before the save":
                signal.raise_signal(signal.SIGTERM)
            state.signal_at = 3 if comes == "in it" else 0
            asked = checkpointer.stop_requested
            checkpointer.save(step, force=step == 3 and comes == "in it")
            if step == 3 and comes == "after it":
                signal.raise_signal(signal.SIGTERM)
            if looks == "before the save" and asked:
                break
            if looks == "after the save" and checkpointer.stop_requested:
                break
        else:
            pytest.fail("the loop does not end")
        made = 3 if comes == "before the save" else 4
        assert step == made + (looks != "after the save")
    again = Counted()
    with Checkpointer(tmp_path, {"it": again}) as checkpointer:
        assert checkpointer.resume() == again.step
        assert made <= again.step <= made + (every == 1)


@pytest.fixture
def python_interrupts() -> Iterator[None]:
    """Let SIGINT raise; a shell ignores it for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
def test_ctrl_c_interrupts_when_it_comes_again(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"x": 1}, every=100) as checkpointer:
        checkpointer.save_on(signal.SIGINT)
        for answered in (False, True):
            signal.raise_signal(signal.SIGINT)
            if answered:
                assert checkpointer.save(1) is not None
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            checkpointer.save(2)
            checkpointer.save(3)
            assert not checkpointer.stop_requested
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_request_outlives_a_save_that_fails(tmp_path: Path) -> None:
    state: dict[str, object] = {"x": lambda: 0}
    with Checkpointer(tmp_path, state, every=100) as checkpointer:
        checkpointer.save_on(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Exception, match="pickle"):
            checkpointer.save(1)
        assert not checkpointer.stop_requested
        state["x"] = 1
        assert checkpointer.save(2) is not None
        assert checkpointer.stop_requested


def test_a_forked_child_dies_of_the_signal_as_ever(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
        checkpointer.save_on(signal.SIGTERM)
        ready, tell = os.pipe()
        child = os.fork()
        if not child:
            os.write(tell, b".")
            time.sleep(60)
            os._exit(1)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        checkpointer.save(1)
        assert not checkpointer.stop_requested
