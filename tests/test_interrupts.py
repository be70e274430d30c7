"""Signal handlers, interrupts and the end of the interpreter: no hang, and nothing is left."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run

import fastserial
from fastserial.engines.threads import ThreadsEngine
from fastserial.files import destination
from fastserial.interrupts import Background, Descriptors, finish


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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


def test_descriptors_close_themselves(tmp_path: Path) -> None:
    gc.collect()  # what tests before have left
    before = descriptors()
    files = Descriptors()
    assert files.newest == -1
    folder = files.open(tmp_path, os.O_RDONLY)
    assert files.open("f", os.O_RDWR | os.O_CREAT, dir_fd=folder) == files.newest
    assert files.duplicate(folder) == files.newest
    assert descriptors() == before + 3
    files.close(but=1)
    assert files.newest == folder
    files.open("f", os.O_RDONLY, dir_fd=folder)
    with pytest.raises(FileNotFoundError):
        files.open("missing", os.O_RDONLY, dir_fd=folder)
    del files
    assert descriptors() == before
    ring: list[object] = [Descriptors()]
    ring.append(ring)
    ring[0].open(tmp_path, os.O_RDONLY)  # type: ignore[attr-defined]
    del ring
    gc.collect()
    assert descriptors() == before


def test_an_interrupt_right_after_the_call(tmp_path: Path) -> None:
    """Whatever is called, an interrupt comes when it returns: no descriptor is lost."""
    before = descriptors()
    for last in range(40):
        countdown = [last]

        def trace(
            frame: object, event: str, call: object, countdown: list[int] = countdown
        ) -> None:
            if event == "c_return":
                countdown[0] -= 1
                if countdown[0] == -1:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        files = Descriptors()
        try:
            sys.setprofile(trace)
            files.open(tmp_path, os.O_RDONLY)
            finish(files.close)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        del files
        assert descriptors() == before
    assert countdown[0] >= 0


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


def test_the_old_file_is_closed_though_a_handler_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "LARGE_FILE", 1)
    fastserial.install()
    torch.save({"x": 1}, tmp_path / "f.pt")
    torch.save({"x": 1}, tmp_path / "f.pt")
    destination.wait_until_free()
    before = descriptors()
    real = Background.start
    rung: list[bool] = []

    def start(threads: Background, *arguments: Any) -> bool:
        if not rung:
            rung.append(True)
            raise KeyboardInterrupt
        return real(threads, *arguments)

    monkeypatch.setattr(Background, "start", start)
    try:
        with pytest.raises(KeyboardInterrupt):
            torch.save({"x": 2}, tmp_path / "f.pt")
    finally:
        fastserial.uninstall()
    destination.wait_until_free()
    assert rung
    assert descriptors() == before
    assert torch.load(tmp_path / "f.pt") == {"x": 2}


def test_threads_end_with_an_engine_that_nobody_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/task"))
    engine = ThreadsEngine(3)
    engine.open((), 6)
    engine._start(fastserial.engines.Op.READ)
    assert len(os.listdir("/proc/self/task")) > before
    del engine
    for _ in range(200):
        if len(os.listdir("/proc/self/task")) <= before:
            break
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) <= before


def test_waiting_for_threads_goes_on_after_an_interrupt() -> None:
    """`Thread.join` takes a thread for ended once a wait for it was interrupted."""
    threads, leave = Background(), threading.Event()
    ended: list[int] = []

    def work() -> None:
        leave.wait()
        ended.append(1)

    assert threads.start(work)
    assert threads.start(work)
    assert len(threads) == 2
    timer = threading.Timer(0.2, leave.set)
    timer.start()
    threads.join()
    assert ended == [1, 1]
    assert len(threads) == 0
    timer.join()
