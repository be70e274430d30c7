"""What ranks meet besides states: unusual targets, groups, long jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks


def test_targets(tmp_path: Path) -> None:
    ranks.run("ranks_targets", 2, tmp_path, timeout=100)


@pytest.mark.parametrize("case", ["groups", "growth"])
def test_long(case: str, tmp_path: Path) -> None:
    ranks.run("ranks_long", 4, tmp_path, case, timeout=200)


def test_what_differs_between_ranks_is_no_file(tmp_path: Path) -> None:
    ranks.run("ranks_differ", 3, tmp_path, timeout=200)
