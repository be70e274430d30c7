"""Parts of a checkpoint, under other names, and what each rank has for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks

from fastserial import Checkpointer, ConfigError


@pytest.mark.parametrize("wrong", [{"x": 1}, {"rng": 1}, {"checkpointer": 1}, 3])
def test_what_per_rank_cannot_be(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError):
        Checkpointer(tmp_path, {"x": 0}, per_rank=wrong)


class Nested(dict):  # type: ignore[type-arg]
    """What torch knows by name only, and does not fill."""


def test_a_dictionary_that_torch_cannot_fill_is_warned_of(tmp_path: Path) -> None:
    with (
        torch.serialization.safe_globals([Nested]),
        Checkpointer(tmp_path, {"nest": Nested(a=1)}) as checkpointer,
        pytest.warns(UserWarning, match=r"nest: .*Nested"),
    ):
        checkpointer.save(1)


@pytest.mark.parametrize("count", [1, 2])
def test_parts(tmp_path: Path, count: int) -> None:
    """See the program: each rank has its own loader, and the parts and names are the same."""
    found = [json.loads(out) for out in ranks.run("ranks_partial", count, tmp_path, "first")]
    for rank, one in enumerate(found):
        assert one["loader"] == [10 + rank, 100 + rank * 5000, 4]
        assert one["no other"] == ["other"]
        assert one["only"] == [1, 1, 3, 1, 0, 0, 0]
        assert one["not_strict"][:2] == [[1, 0], ["model.tail.weight", "new"]]
        assert one["renamed"] == [1, 1, 3, 1, 1, 1]
    assert found[0]["not_strict"][2] == ["epoch", "loose", "model.head.weight"]
    with Checkpointer(tmp_path, {"loose": torch.zeros(3)}) as checkpointer:
        checkpointer.resume(only=["loose"])  # without a warning: no generators are restored
    if count > 1:
        (alone,) = (json.loads(out) for out in ranks.run("ranks_partial", 1, tmp_path, "again"))
        assert alone == {"missing": ["loader"], "loader": 0}
