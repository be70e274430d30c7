"""Trace events of saves and loads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.identity import last_save
from support.loading import last_report

import fastserial
from fastserial import trace
from fastserial.trace import IN_FLIGHT, Event

STATE = {"a": torch.arange(3_000_000), "b": torch.zeros(7)}


@pytest.fixture(autouse=True)
def _installed() -> object:
    fastserial.install(block_size=1 << 20)
    yield
    fastserial.uninstall()


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_steps_of_a_save(tmp_path: Path, container: str) -> None:
    heard: list[Event] = []
    with trace.listen(heard.append):
        torch.save(STATE, tmp_path / "f", _use_new_zipfile_serialization=container == "zip")
    report = last_save()
    assert names(heard).count("device write") == report.complete.count > 20
    assert names(heard).count(IN_FLIGHT) == report.complete.count
    steps = ["open target", "preallocate", "start engine", "stop engine", "fsync"]
    steps += ["directory sync", "rename"]  # the one is told at its end, before the other
    places = [names(heard).index(step) for step in steps]
    assert places == sorted(places)
    assert "layout" in names(heard)
    assert all(event.start <= event.end for event in heard)
    torch.save(STATE, tmp_path / "f")
    assert names(heard).count("open target") == 1


def test_steps_of_a_load(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "f")
    heard: list[Event] = []
    with trace.listen(heard.append):
        torch.load(tmp_path / "f")
    report = last_report()
    assert report.engine == "threads"
    for name in ("device read", "deliver", IN_FLIGHT):
        assert names(heard).count(name) == report.complete.count > 0


def test_a_listener_that_fails_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise ValueError(event.name)

    with caplog.at_level(logging.ERROR, "fastserial"), trace.listen(fail):
        torch.save(STATE, tmp_path / "f")
    assert torch.equal(torch.load(tmp_path / "f")["a"], STATE["a"])
    assert "a listener to trace events failed at 'fsync'" in caplog.text
