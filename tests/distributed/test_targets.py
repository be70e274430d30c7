"""What ranks meet besides states: unusual targets, groups, long jobs, FSDP1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import ranks

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"


@pytest.mark.parametrize(("scene", "count"), [("targets", 2), ("groups", 4), ("fsdp1", 2)])
def test_targets(scene: str, count: int, tmp_path: Path) -> None:
    ranks.run("ranks_scenes", count, scene, tmp_path, timeout=200)


def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    ranks.run("ranks_resources", 4, "growth", tmp_path, 120 if FULL else 60, timeout=200)


def test_what_differs_between_ranks_is_no_file(tmp_path: Path) -> None:
    ranks.run("ranks_fail", 3, tmp_path, "differ", timeout=200)
