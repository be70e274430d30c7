"""Checkpointer and its folder on several ranks, which need not see the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `ranks_folder` came to, by rank."""
    folder = tmp_path_factory.mktemp("folders")
    return [json.loads(out) for out in ranks.run("ranks_folder", 2, folder)]


def test_ranks_without_a_common_checkpoint_do_not_start_anew(told: list[dict[str, Any]]) -> None:
    for found in (rank["not_shared"] for rank in told):
        for name, here, there, step in (("0", 0, 1, 10), ("1", 1, 0, 20)):
            error = found[name][0]
            assert error.startswith(f"DistributedError: rank {there}: "), error
            assert f"rank {there} sees none in " in error
            assert f"{name}-of-{there}" in error
            assert f"rank {here} sees step {step} in " in error
        assert found["both"] == [10]
