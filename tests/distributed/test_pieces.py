"""What a rank holds of a tensor, against what torch made of it."""

from __future__ import annotations

import ast

import pytest
from support import ranks


@pytest.mark.parametrize("count", [2, 4])
def test_what_a_rank_holds(count: int) -> None:
    seen = ast.literal_eval(ranks.run("ranks_hold", count, 11, 90)[0])
    assert seen["strided"] >= 5
    if count == 4:
        assert seen["ambiguous"] >= 1
