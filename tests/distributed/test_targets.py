"""What ranks meet besides states: unusual targets, groups, long jobs, FSDP1."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks


@pytest.mark.parametrize(
    ("scene", "count"), [("targets", 2), ("groups", 4), ("growth", 4), ("fsdp1", 2)]
)
def test_targets(scene: str, count: int, tmp_path: Path) -> None:
    ranks.run("ranks_scenes", count, scene, tmp_path, timeout=200)


def test_what_differs_between_ranks_is_no_file(tmp_path: Path) -> None:
    ranks.run("ranks_differ", 3, tmp_path, timeout=200)
