"""The option `priority`: of the threads that save, and of no other."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fastserial
from fastserial import distributed
from fastserial.engines import Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.overlap.priority import _CALLS


def priorities() -> tuple[int, int | None]:
    """The calling thread's niceness, and its I/O class and level."""
    thread = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    call = _CALLS.get(platform.machine())
    if call is None:
        return nice, None
    get = call + 1  # next to `ioprio_set` on all of them
    return nice, ctypes.CDLL(None).syscall(get, 1, thread)


def save(how: str, state: Any, path: Path, seen: set[tuple[int, int | None]]) -> None:
    class Watching(ThreadsEngine):
        name = "watching"

        def submit(self, requests: Sequence[Request]) -> None:
            seen.add(priorities())
            super().submit(requests)

        @classmethod
        def _serve(cls, request: Request) -> Any:
            seen.add(priorities())
            return super()._serve(request)

    with fastserial.options(engine=Watching, small_file=0, block_size=65536, durable=False):
        if how == "alone":
            fastserial.save_async(state, path).wait()
        elif how == "ranks":
            distributed.save_async(state, path).wait()
        else:
            with fastserial.Checkpointer(path.parent, state) as checkpointer:
                checkpointer.save(1)


@pytest.mark.parametrize("how", ["alone", "ranks", "checkpointer"])
def test_low(tmp_path: Path, state: Any, how: str) -> None:
    before, seen = priorities(), set()
    with fastserial.options(priority="low"):
        save(how, state, tmp_path / "state.pt", seen)
    assert seen == {(10, None if before[1] is None else 2 << 13 | 7)}
    assert priorities() == before


def test_normal(tmp_path: Path, state: Any) -> None:
    seen: set[tuple[int, int | None]] = set()
    save("alone", state, tmp_path / "state.pt", seen)
    assert seen == {priorities()}


def test_where_it_cannot_be_lowered(
    tmp_path: Path, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr("platform.machine", lambda: "unheard of")
    with fastserial.options(priority="low"):
        report = fastserial.save_async(state, tmp_path / "state.pt").wait()
    assert report.bytes == (tmp_path / "state.pt").stat().st_size


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERIAL_PRIORITY", "Low")
    with fastserial.options() as config:
        assert config.priority == "low"
    for value in ("high", ""):
        with pytest.raises(fastserial.ConfigError, match="priority"):
            fastserial.install(priority=value)
