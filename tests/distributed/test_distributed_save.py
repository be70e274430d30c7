"""One file from many ranks: the bytes of stock's `torch.save` of the whole state.

`FASTSERIAL_DISTRIBUTED=full` runs the long forms (`nox -s distributed`).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from support import ranks

from fastserial import distributed
from fastserial.checkpoints.save import save

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
MIB = 1024 * 1024


@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize(
    ("count", "cases"),
    [(1, 20), (2, 60), (3, 60), (4, 80)]
    if not FULL
    else [(1, 60), (2, 300), (3, 300), (4, 400), (6, 100), (8, 100)],
)
def test_the_bytes_of_stock(count: int, cases: int, tmp_path: Path) -> None:
    ranks.run("ranks_save", count, tmp_path, 100 + count, cases, timeout=1100 if FULL else 280)


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
    out = ranks.run("ranks_train", count, tmp_path, *kinds)[0]
    assert [line.split()[0] for line in out.splitlines()] == list(kinds)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "cases"), [(1, 20), (2, 40), (4, 40)])
def test_the_bytes_of_safetensors(count: int, cases: int, tmp_path: Path) -> None:
    """The files of `save_pretrained`, of 1 to many shards, and loaded again."""
    pytest.importorskip("safetensors")
    pytest.importorskip("huggingface_hub")
    cases *= 20 if FULL else 1
    several = ranks.run("ranks_safetensors", count, tmp_path, 7 * count, cases, timeout=500)[0]
    assert int(several) > cases // 10


def test_messages_of_all_lengths() -> None:
    lengths = (0, 1, 900, 1015, 1016, 1017, 1024, 2040, 70_000, 3_000_000, 5)
    assert ranks.run("ranks_talk", 3, "lengths", *lengths) == [f"{len(lengths)}\n"] * 3


FAILURES = (
    *("unpicklable", "key", "shape", "partial", "placement", "resized", "flat_type", "gap", "full"),
    *("interrupted", "silent"),
)


def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    out = ranks.run("ranks_fail", 3, tmp_path, *FAILURES)
    assert out == ["".join(f"{name}\n" for name in FAILURES)] * 3


def test_a_rank_that_comes_after_the_failure_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert ranks.run("ranks_talk", 3, "late", tmp_path, timeout=60) == ["1\n"] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: no mount of its own for one rank")
def test_a_rank_that_sees_another_file_system(tmp_path: Path) -> None:
    assert ranks.run("ranks_fail", 3, tmp_path, "unseen") == ["unseen\n"] * 3


def test_a_rank_that_fails_in_the_middle_of_a_message() -> None:
    assert ranks.run("ranks_talk", 2, "broken_off") == ["0 True True\n"] * 2


@pytest.mark.timeout(1800 if FULL else 300)
def test_killed_ranks_leave_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    chance = random.Random(17)
    trials = 100 if FULL else 2
    hits = sum(killed(chance, tmp_path / str(trial)) for trial in range(trials))
    assert hits >= (trials // 2 if FULL else 1), "the kills missed the saves"


def killed(chance: random.Random, folder: Path) -> bool:
    """Kill a rank of a job that saves all the time; return whether it was in a save."""
    out = folder / "out"
    out.mkdir(parents=True)
    (folder / "flags").write_bytes(bytes(4))
    count = chance.choice([2, 4])
    job = ranks.Job("ranks_die", count, folder, 20)
    victim, ended = job.kill_somewhere(out / "file.pt", chance, 60)
    for rank, end in enumerate(ended):
        if rank != victim:
            assert end.code == 0, end
            culprit, seconds = end.out.split()
            assert int(culprit) == victim, end
            assert float(seconds) < 60, "it hung"
    state = torch.load(out / "file.pt")
    assert all(torch.all(state[key] == state["step"]) for key in ("rows", "columns", "all"))
    left = [path.name for path in out.iterdir() if path.name != "file.pt"]
    if left:  # rank 0 was killed before the others knew of the new file: the next save removes it
        assert victim == 0
        save(state, str(out / "file.pt"))
        assert [path.name for path in out.iterdir()] == ["file.pt"]
    return (folder / "flags").read_bytes()[victim] == 1


@pytest.mark.parametrize("count", [2, 4] if FULL else [2])
def test_memory_does_not_grow_with_the_state(count: int, tmp_path: Path) -> None:
    size = 1024 if FULL else 160
    for out in ranks.run("ranks_memory", count, tmp_path, size):
        assert int(out) <= 128 * MIB


def test_pipeline_stages_are_saved_as_one_state(tmp_path: Path) -> None:
    assert int(ranks.run("ranks_union", 4, tmp_path)[0]) > 12 * MIB


def test_what_changed_since_the_last_save_is_in_the_file(tmp_path: Path) -> None:
    """And what did not change is neither planned nor pickled again."""
    assert ranks.run("ranks_change", 3, tmp_path) == ["done\n"] * 3


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """Before the ranks have exchanged anything, and in code of the user's: nobody waits 600 s."""
    out = ranks.run("ranks_apart", 3, tmp_path, timeout=120)
    assert [len(text.split()) for text in out] == [8, 8, 8]


def test_fsdp1_is_saved_with_a_device_mesh(tmp_path: Path) -> None:
    assert ranks.run("ranks_fsdp1", 2, tmp_path) == ["done\n"] * 2


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    assert ranks.run("ranks_group", 3, tmp_path) == ["done\n"] * 3


def test_one_process_without_a_group(tmp_path: Path) -> None:
    """A script for many ranks runs on one, too."""
    state = {"x": torch.arange(5000), "y": [1, "two"]}
    (tmp_path / "stock").mkdir()
    torch.save(state, tmp_path / "stock" / "file.pt")
    distributed.save(state, tmp_path / "file.pt")
    assert (tmp_path / "file.pt").read_bytes() == (tmp_path / "stock" / "file.pt").read_bytes()


@pytest.mark.parametrize(
    "case",
    [
        *("within_an_object", "stages_change", "turned_mesh", "modes"),
        *("type_of_shards", "unknown_placement"),
    ],
)
def test_unusual_states(case: str, tmp_path: Path) -> None:
    ranks.run("ranks_odd", 3, tmp_path, case, timeout=100)
