"""Saves of ranks whose tensors are on a device: through pinned memory, as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scene", ["identity", "folder_of_dcp", "overlap"])
def test_devices(scene: str, tmp_path: Path) -> None:
    ranks.run("ranks_device", 2, scene, tmp_path)


def test_copies_that_nobody_waits_for_are_found(tmp_path: Path) -> None:
    """The control."""
    ranks.run("ranks_device", 2, "control", tmp_path)
