"""Signal handlers that raise, save and load at random moments of saves and loads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.processes import run

pytestmark = pytest.mark.timeout(7200)

_MORE_MEMORY = 24 << 20  # bytes that the noise of an allocator may add
_TRIALS = 80
_NAMES = {"save": "saves", "load": "loads", "tool": "checks, conversions, Checkpointers"}


def interrupted(folder: Path, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("interrupted", folder, *words, timeout=7200).out)
    return found


def _spare(trials: int) -> int:
    """How many descriptors a nested read may leave for the next one."""
    return 2 + trials // 1000


@pytest.mark.trials(_TRIALS, 10_000)
@pytest.mark.parametrize("handler", ["raise", "work"])
@pytest.mark.parametrize("what", ["save", "load", "tool"])
def test_interrupts(
    what: str, handler: str, tmp_path: Path, counts: Counter[str], trials: int
) -> None:
    result = interrupted(tmp_path, what, handler, trials)
    before, after, found = result["before"], result["after"], result["found"]
    assert result["wrong"] == []
    assert found["inside"] >= found["rung"] // 10, "they must hit fastserial's own lines"
    for kind in ("enabled", "thresholds"):
        assert after[kind] == before[kind], result
    assert after["descriptors"] <= before["descriptors"] + _spare(trials), result
    assert after["threads"] <= before["threads"] + 3, result
    assert result["growth"] < _MORE_MEMORY, result
    assert not [name for name in result["names"] if name.startswith(".")], result
    counts[f"{_NAMES[what]}: {'handler raised' if handler == 'raise' else 'handler worked'}"] += (
        trials
    )
    counts["of these inside fastserial"] += found["inside"]


def test_interrupts_leave_descriptors_where_nothing_closes_them(tmp_path: Path) -> None:
    """The control: without the guards of `interrupts`."""
    trials = 4 * _TRIALS
    result = interrupted(tmp_path, "save", "raise", trials, "unguarded")
    assert result["after"]["descriptors"] > result["before"]["descriptors"] + _spare(trials)


def test_interrupts_tear_what_is_overwritten(tmp_path: Path) -> None:
    """The control: files that cannot be replaced."""
    assert interrupted(tmp_path, "save", "raise", _TRIALS, "open")["wrong"]


def test_errors_of_handlers_are_taken_for_the_disks(tmp_path: Path) -> None:
    """The control: nothing asks who raised an error."""
    wrong = interrupted(tmp_path, "save", "raise", _TRIALS, "blind")["wrong"]
    assert any("the previous file is intact" in text or "swallowed" in text for text in wrong)
