"""One file from many ranks: the bytes of stock's `torch.save` of the whole state.

`FASTSERIAL_DISTRIBUTED=full` runs the long forms (`nox -s distributed`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import ranks

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
MIB = 1024 * 1024


@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize(
    ("count", "cases"),
    [(1, 20), (3, 60), (4, 80)]
    if not FULL
    else [(1, 60), (2, 300), (3, 300), (4, 400), (6, 100), (8, 100)],
)
def test_the_bytes_of_stock(count: int, cases: int, tmp_path: Path) -> None:
    words = ("save", tmp_path, 100 + count, cases)
    ranks.run("ranks_random", count, *words, timeout=1100 if FULL else 280)


@pytest.mark.parametrize(
    ("count", "kinds"),
    [
        (2, ("plain", "ddp", "fsdp", "fsdp-tied", "fsdp-large")),
        (4, ("fsdp-tp", "fsdp-tp-large", "fsdp-large")),
    ],
)
def test_modules_and_optimizers(count: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    if torch.__version__.startswith("2.6."):  # there FSDP2's forward pass fails on a CPU
        kinds = ("plain", "ddp")
    out = ranks.run("ranks_train", count, "as_stock", tmp_path, *kinds)[0]
    assert [line.split()[0] for line in out.splitlines()] == list(kinds)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "cases"), [(1, 20), (4, 24)])
def test_the_bytes_of_safetensors(count: int, cases: int, tmp_path: Path) -> None:
    """The files of `save_pretrained`, of 1 to many shards, and loaded again."""
    pytest.importorskip("safetensors")
    pytest.importorskip("huggingface_hub")
    cases *= 20 if FULL else 1
    words = ("safetensors", tmp_path, 7 * count, cases)
    several = ranks.run("ranks_random", count, *words, timeout=500)[0]
    assert int(several) > cases // 10


def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """Whatever fails, the user's own code included: nobody waits, and the old file stays."""
    out = ranks.run("ranks_fail", 3, tmp_path, "all")
    assert [len(text.split()) for text in out] == [10] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: no mount of its own for one rank")
def test_a_rank_that_sees_another_file_system(tmp_path: Path) -> None:
    assert ranks.run("ranks_fail", 3, tmp_path, "unseen") == ["unseen\n"] * 3


@pytest.mark.parametrize("how", ["one", "dcp"])
@pytest.mark.parametrize("count", [2, 4] if FULL else [2])
def test_memory_does_not_grow_with_the_state(count: int, how: str, tmp_path: Path) -> None:
    """Nor with the file, in loads; one file, or a folder of torch.distributed.checkpoint."""
    mib = 1024 if FULL else 320
    for out in ranks.run("ranks_resources", count, "memory", tmp_path, mib, how):
        assert all(int(peak) <= 128 * MIB for peak in out.split()), out


def test_pipeline_stages_are_saved_as_one_state(tmp_path: Path) -> None:
    assert int(ranks.run("ranks_union", 4, tmp_path)[0]) > 12 * MIB
