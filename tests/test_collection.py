"""Pauses of the garbage collector nest, meet in threads, and end."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

import fastserial
from fastserial.collection import paused_collection


def test_it_is_back_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collection():
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_whoever_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


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
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_forked_child_collects() -> None:
    with paused_collection():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()


class _Watcher:
    """Notes whether cycles are collected while it is unpickled."""

    seen: list[bool]

    def __setstate__(self, state: object) -> None:
        _Watcher.seen.append(gc.isenabled())


def test_loads_of_many_small_tensors(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "checkpoint.pt")
    watcher = _Watcher()
    watcher.x = 1  # type: ignore[attr-defined]
    torch.save({"w": watcher, **{str(i): torch.ones(4) for i in range(50)}}, path)
    _Watcher.seen = []
    fastserial.install()
    try:
        torch.load(path, weights_only=False)
        assert gc.isenabled()
        with open(path, "r+b") as file:  # an error ends the pause, too
            data = file.read()
            at = data.index(b"__main__") if b"__main__" in data else data.index(b"_Watcher")
            file.seek(at)
            file.write(b"\xff" * 4)
        with pytest.raises(Exception):  # noqa: B017, PT011
            torch.load(path, weights_only=False)
        assert gc.isenabled()
    finally:
        fastserial.uninstall()
    assert _Watcher.seen == [False]
    target = {"a": torch.zeros(4)}
    torch.save({"a": torch.ones(4)}, path)
    fastserial.load_into(target, path)
    assert gc.isenabled()
    assert torch.equal(target["a"], torch.ones(4))
