"""Collective saves beside training: every file is the state at its call."""

from __future__ import annotations

import ast
import os
from itertools import product
from pathlib import Path

import pytest
import torch
from support import ranks

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
KINDS = ("ddp",) if torch.__version__.startswith("2.6.") else ("ddp", "fsdp")  # no FSDP2 on CPUs
PAIRS = list(product(KINDS, (2, 4))) if FULL else [(KINDS[0], 2), (KINDS[-1], 4)]


def hostile(folder: Path, count: int, kind: str, trials: int, *more: object) -> dict[str, int]:
    out = ranks.run("ranks_beside", count, folder, kind, trials, count, *more, timeout=3000)
    found: dict[str, int] = ast.literal_eval(out[0])
    print(kind, count, found)
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "count"), PAIRS)
def test_no_file_is_torn(tmp_path: Path, count: int, kind: str) -> None:
    trials = 250 if FULL else 12
    assert hostile(tmp_path, count, kind, trials) == {"saved": trials, "wrong": 0}


@pytest.mark.parametrize("kind", KINDS if FULL else KINDS[:1])
def test_without_copies_files_are_torn(tmp_path: Path, kind: str) -> None:
    assert hostile(tmp_path, 2, kind, 60, "uncopied")["wrong"]
