"""torch.distributed.checkpoint on several ranks, with our storage and planners."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import ranks
from support.nests import blank, differing

from fastserial import convert, verify
from fastserial.distributed import FastStorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # that this is one process
FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
ALONE = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="dcp.save of this torch has no use_collectives",
)


@pytest.mark.parametrize(
    ("count", "cases"),
    [(1, 12), (2, 15), (4, 12)] if not FULL else [(1, 60), (2, 150), (3, 100), (4, 150), (6, 60)],
)
def test_round_trips_with_stock(count: int, cases: int, tmp_path: Path) -> None:
    ranks.run("ranks_random", count, "by_dcp", tmp_path, 300 + count, cases, timeout=280)
    for folder in sorted(tmp_path.iterdir()):
        report = verify(folder)
        assert report.ok, report
        convert(folder, tmp_path / "file.pt")
        found = torch.load(tmp_path / "file.pt", weights_only=True)
        expected = blank(found)
        dcp.load(expected, storage_reader=FastStorageReader(folder))
        assert not differing(expected, found), folder


@pytest.mark.parametrize(
    ("scene", "who"),
    [
        ("sharded_tensors", ()),
        ("async_save", ()),
        ("load", ()),
        pytest.param("each_alone", (), marks=ALONE),
    ],
)
def test_scenes(scene: str, who: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    ranks.run("dcp_scenes", 2, scene, folder, *who)
    if scene == "each_alone":
        names = set(os.listdir(folder))
        assert names > {"__0.metadata", "__1.metadata"}
        assert len(names) == 4, "files of earlier checkpoints stay behind"


def test_a_rank_that_fails_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    assert ranks.run("dcp_scenes", 2, "failing", tmp_path / "ours", "ours") == ["1\n", "1\n"]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="seen with torch 2.13: earlier ones not")
def test_what_stock_leaves_then_is_a_mix(tmp_path: Path) -> None:
    """So the test before this one can fail."""
    out = ranks.run("dcp_scenes", 2, "failing", tmp_path / "stock", "stock")
    assert "1\n" not in out or out[0] != out[1]
