"""`fastserial.distributed.load`, on real ranks."""

from __future__ import annotations

import ast
import os
import signal
from pathlib import Path

import pytest
from support import ranks

FULL = "full" in map(os.environ.get, ("FASTSERIAL_FAULTS", "FASTSERIAL_DISTRIBUTED"))
SEED = int(os.environ.get("FASTSERIAL_FAULTS_SEED", "20261122"))


@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize(("count", "cases"), [(4, 700), (8, 500)] if FULL else [(4, 80)])
def test_any_placement_loads_from_any_file(tmp_path: Path, count: int, cases: int) -> None:
    out = ranks.run("ranks_random", count, "load", tmp_path, SEED, cases, timeout=1100)
    seen = ast.literal_eval(out[0])
    assert seen["moved"] > 100_000 * cases / 200
    assert seen["verified"] > cases / 20


def test_cases(tmp_path: Path) -> None:
    out = ranks.run("load_cases", 3, tmp_path)
    assert [len(text.split()) for text in out] == [17] * 3


@pytest.mark.parametrize("how", ["die", "stop"])
def test_a_rank_that_is_lost(tmp_path: Path, how: str) -> None:
    ended = ranks.Job("ranks_scenes", 3, "lost", tmp_path, how).wait(120)
    assert ended[2].code == -signal.SIGKILL
    for end in ended[:2]:
        assert end.code == 0, end.err
        rank, seconds, text = end.out.strip().split("|")
        assert int(rank) == 2
        assert "filled in part" in text
        assert ("not heard from for 5 seconds" if how == "stop" else "its process ended") in text
        assert float(seconds) < 20
