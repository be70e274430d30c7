"""Pauses of the garbage collector nest, meet in threads, and end."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
import torch

import fastserial
from fastserial.memory.held_settings import paused_collection


def collects() -> bool:
    return gc.isenabled() and 0 < gc.get_threshold()[0] < 100_000


def test_it_is_back_afterwards() -> None:
    before = gc.get_threshold()
    assert collects()
    with pytest.raises(KeyError), paused_collection():
        with paused_collection():
            assert not collects()
        assert not collects()
        raise KeyError
    assert collects()
    assert gc.get_threshold() == before


def test_whoever_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_others_set_meanwhile_stays() -> None:
    """As training loops do that collect at times of their own, in another thread."""
    before = gc.get_threshold()
    try:
        with paused_collection():
            gc.disable()
        assert not gc.isenabled()
        assert gc.get_threshold() == before
        with paused_collection():
            gc.set_threshold(50_000, 20, 30)
        assert gc.get_threshold() == (50_000, 20, 30)
        gc.set_threshold(0)
        with paused_collection():
            pass
        assert gc.get_threshold()[0] == 0
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_it_is_back_when_the_end_is_skipped() -> None:
    """As by an interrupt that comes in the first line of `__exit__`."""
    before = gc.get_threshold()
    pauses = [paused_collection(), paused_collection()]
    for pause in pauses:
        pause.__enter__()
    pauses.pop()
    assert not collects()
    pauses.pop()
    del pause
    assert gc.get_threshold() == before


def test_a_pause_that_nobody_ends_is_collected() -> None:
    """As one in the traceback of an interrupt, which a program keeps."""

    class Cycle:
        pass

    before = gc.get_threshold()
    cycle = Cycle()
    cycle.me, cycle.pause = cycle, paused_collection()  # type: ignore[attr-defined]
    cycle.pause.begin()  # type: ignore[attr-defined]
    del cycle
    assert not collects()
    kept = []
    for _ in range(3_000_000):
        kept.append([])
        if collects():
            break
    assert gc.get_threshold() == before


def test_a_signal_handler_loads_at_any_moment() -> None:
    """Each function of the module is interrupted once by a pause of the handler's."""
    done: list[str] = []

    def trace(frame: object, event: str, argument: object) -> None:
        sys.setprofile(None)
        with paused_collection():
            done.append(event)
        sys.setprofile(trace)

    def run() -> None:
        sys.setprofile(trace)
        with paused_collection(), paused_collection():
            pass
        sys.setprofile(None)

    before = gc.get_threshold()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(done) > 10
    assert gc.get_threshold() == before


def test_the_last_thread_ends_the_pause() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused_collection():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with paused_collection():
        thread.start()
        entered.wait()
    assert not collects()
    leave.set()
    thread.join()
    assert collects()


def test_a_forked_child_collects() -> None:
    with paused_collection():
        child = os.fork()
        if child == 0:
            os._exit(0 if collects() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not collects()


class _Watcher:
    """Notes whether cycles are collected while it is unpickled."""

    seen: list[bool]

    def __setstate__(self, state: object) -> None:
        _Watcher.seen.append(collects())


def test_loads_of_many_small_tensors(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "checkpoint.pt")
    watcher = _Watcher()
    watcher.x = 1  # type: ignore[attr-defined]
    torch.save({"w": watcher, **{str(i): torch.ones(4) for i in range(50)}}, path)
    _Watcher.seen = []
    fastserial.install()
    try:
        torch.load(path, weights_only=False)
        assert collects()
        with open(path, "r+b") as file:  # an error ends the pause, too
            data = file.read()
            at = data.index(b"__main__") if b"__main__" in data else data.index(b"_Watcher")
            file.seek(at)
            file.write(b"\xff" * 4)
        with pytest.raises(UnicodeDecodeError):
            torch.load(path, weights_only=False)
        assert collects()
    finally:
        fastserial.uninstall()
    assert _Watcher.seen == [False]
    target = {"a": torch.zeros(4)}
    torch.save({"a": torch.ones(4)}, path)
    fastserial.load_into(target, path)
    assert collects()
    assert torch.equal(target["a"], torch.ones(4))


class _Pickled:
    """Notes whether cycles are collected while it is pickled; fails if it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.seen = error, list[bool]()

    def __getstate__(self) -> int:
        self.seen.append(collects())
        if self.error is not None:
            raise self.error
        return 0


@pytest.mark.parametrize("error", [None, ValueError("not today")])
def test_saves_of_many_small_tensors(tmp_path: os.PathLike[str], error: Exception | None) -> None:
    before = gc.get_threshold()
    value = _Pickled(error)
    written: list[bool] = []
    path = os.path.join(tmp_path, "checkpoint.pt")
    fastserial.install(on_report=lambda report: written.append(collects()))
    try:
        if error is None:
            torch.save(value, path)
        else:
            with pytest.raises(ValueError, match="not today"):
                torch.save(value, path)
    finally:
        fastserial.uninstall()
    assert value.seen == [False]
    assert written == ([True] if error is None else [])
    assert gc.get_threshold() == before
