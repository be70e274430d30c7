"""Settings of the interpreter that saves and loads change for a time are as before afterwards.

The garbage collector pauses while many objects are made; threads take turns more often while a
save moves blocks.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial
from fastserial.progress import ProgressBar


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    fastserial.install(small_file=0, block_size=65536)
    yield
    fastserial.uninstall()
    gc.enable()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


def collects() -> bool:
    return gc.isenabled() and 0 < gc.get_threshold()[0] < 100_000


class _Watcher:
    """Does something when it is pickled and unpickled."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __reduce__(self) -> Any:
        self.act()
        return (_unpickled, ())


seen: list[bool] = []


def _unpickled() -> None:
    seen.append(collects())


def _fail() -> None:
    raise ValueError("not today")


def test_saves_and_loads_pause_the_collector(tmp_path: Path) -> None:
    seen.clear()
    path = tmp_path / "a.pt"
    state = [_Watcher(lambda: seen.append(collects())), torch.ones(3 << 20)]  # no small file
    torch.save(state, path)
    assert collects()
    torch.load(path, weights_only=False)
    assert collects()
    assert seen == [False, False]
    with pytest.raises(ValueError, match="not today"):
        torch.save([_Watcher(_fail)], path)
    assert collects()


@pytest.mark.parametrize("switch_off", [gc.disable, lambda: gc.set_threshold(0)])
def test_whoever_switched_it_off_keeps_it_off(tmp_path: Path, switch_off: Any) -> None:
    switch_off()
    torch.save([torch.ones(4)], tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt")
    assert not collects()


def test_what_the_program_sets_meanwhile_stays(tmp_path: Path) -> None:
    torch.save([_Watcher(lambda: gc.set_threshold(901, 9, 8))], tmp_path / "a.pt")
    assert gc.get_threshold() == (901, 9, 8)


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")])
def test_threads_take_turns_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    sys.setswitchinterval(0.004)
    during: list[float] = []

    def update(bar: ProgressBar, length: int) -> None:
        during.append(sys.getswitchinterval())
        if error is not None:
            raise error

    monkeypatch.setattr(ProgressBar, "update", update)
    raises = pytest.raises(OSError, match="disk is gone") if error else contextlib.nullcontext()
    with fastserial.options(progress=True), raises:
        torch.save(torch.rand(100_000), tmp_path / "a.pt")
    assert max(during) < 0.004 == sys.getswitchinterval()
