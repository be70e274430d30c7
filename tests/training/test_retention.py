"""Which checkpoints stay, and when one is made: rules against a plain reckoning of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.lives import names
from support.others import in_child

import fastserial
from fastserial import Checkpointer
from fastserial.files.temporary import temporary_name
from fastserial.training import checkpointer as module
from fastserial.training.folder import Retention, seconds_of


def steps(folder: Path) -> list[int]:
    return sorted(int(name[5:-3]) for name in names(folder))


@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.sets(st.integers(0, 60)),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([None, "min", "max"]),
    st.one_of(st.none(), st.integers(0, 50)),
    st.data(),
)
def test_each_rule_keeps_what_it_says(
    there: set[int],
    stale: set[int],
    last: int,
    every: int | None,
    best: Any,
    seconds: int | None,
    data: st.DataObject,
) -> None:
    values = {
        step: data.draw(st.sampled_from([None, float("nan"), 0.5, 1.0, 2.0])) for step in there
    }
    rule = Retention(last, every, best and ("loss", best), seconds)
    ordered = sorted(there, reverse=True)
    gone = set(rule.surplus(ordered, stale, lambda step: 60.0 - step, values.get))
    mine = [step for step in ordered if step not in stale]
    assert gone <= there
    assert (mine or ordered)[0] not in gone  # never the last good one
    assert not gone & set(mine[:last])
    assert not every or not [step for step in gone - stale if step % every == 0]
    assert seconds is None or not [step for step in gone - stale if 60 - step <= seconds]
    known = {step: v for step in mine if (v := values[step]) is not None and v == v}
    if best and known:
        target = (min if best == "min" else max)(known.values())
        kept = [step for step in known if known[step] == target and step not in gone]
        assert kept
    if every is None and seconds is None and best is None:
        assert len(there - gone) == min(last, len(there))


def test_rules_of_a_run(tmp_path: Path) -> None:
    """The best one is known to the next process, too."""
    losses = {1: 3.0, 2: 0.5, 3: 2.0, 4: 1.0, 5: 0.7, 6: 0.6, 7: 0.9, 8: 0.8}
    for some in (range(1, 6), range(6, 9)):
        with Checkpointer(
            tmp_path, {"x": 1}, keep=1, keep_every=4, keep_best=("loss", "min")
        ) as checkpointer:
            for step in some:
                checkpointer.save(step, metrics={"loss": torch.tensor(losses[step])})
    assert steps(tmp_path) == [2, 4, 8]
    assert torch.load(tmp_path / "step-00000002.pt")["checkpointer"]["metrics"] == {"loss": 0.5}


def test_by_age(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"x": 1}, keep=1, keep_for="1h") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
            checkpointer.wait()
            if step == 1:
                os.utime(tmp_path / "step-00000001.pt", (time.time() - 7200,) * 2)
    assert steps(tmp_path) == [2, 3]


def test_metrics_have_to_have_what_is_compared(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"x": 1}, keep_best=("loss", "min")) as checkpointer:
        with pytest.raises(fastserial.ConfigError, match="metrics lack 'loss'"):
            checkpointer.save(1, metrics={"accuracy": 1.0})
        checkpointer.save(1)  # not evaluated in this step


def test_names(tmp_path: Path) -> None:
    """Others stay, also those that are much like them; what killed saves left goes."""
    others = {"run-10.ckpt.bak", "run-010.ckpt", "run-1.pt", ".other.pt.fastserial-0.tmp"}
    for name in (*others, in_child(lambda: temporary_name("run-4.ckpt"))):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "run-0.ckpt").mkdir()
    state = {"x": 1}
    with Checkpointer(tmp_path, state, keep=2, name="run-{step}.ckpt") as checkpointer:
        checkpointer.resume()
        for step in (9, 10, 11):
            checkpointer.save(step)
        checkpointer.wait()
        assert checkpointer.resume() == 11
    assert set(names(tmp_path)) == others | {"run-0.ckpt", "run-10.ckpt", "run-11.ckpt"}
    for wrong in ("run.pt", "{step}-{step}.pt", "{x}.pt", "a/{step}.pt", "{step:.0s}x", "{"):
        with pytest.raises(fastserial.ConfigError, match="name must be"):
            Checkpointer(tmp_path, state, name=wrong)


def test_on_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def saved(step: int, path: str) -> None:
        told.append((step, torch.load(path)["x"]))
        raise ValueError("mine")

    state = {"x": 7}
    with Checkpointer(tmp_path, state, keep=1, on_saved=saved) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step)
    assert told == [(0, 7), (1, 7)]
    assert "mine" in caplog.text
    assert steps(tmp_path) == [1]


def test_every(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many steps, or so much time."""
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    for every, wanted in ((10, [10, 20, 30]), ("10min", [7, 14, 21, 28, 30])):
        folder, now[0] = tmp_path / str(every), 0.0
        with Checkpointer(folder, {"x": 1}, keep=9, every=every) as checkpointer:
            for step in range(1, 31):
                now[0] = step * 90.0  # seconds
                checkpointer.save(step)
            assert checkpointer.save(30, force=True) is not None
        assert steps(folder) == wanted


@pytest.mark.parametrize("text", ["", "10", "min", "-1s", "1 week", "0s", 5])
def test_times(text: Any) -> None:
    with pytest.raises(fastserial.ConfigError, match="a time such as"):
        seconds_of("every", text)
    for good, seconds in {"90s": 90, "1.5min": 90, "2 h": 7200, "7d": 604800}.items():
        assert seconds_of("x", good) == seconds
