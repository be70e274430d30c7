"""Checkpoints of a DeepSpeed engine: stock's files, and a `latest` that can be relied on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from said import Launch, Said, having, losses, parsed
from support.processes import run

from fastserial.diagnosis.examine import examine

SHORT = ["--bf16", "--steps", 2, "--save-at", 1]


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


WAYS = {"at once": [], "overlapped": ["--overlap"]}  # the second: beside training


def compared(launch: Launch, folder: Path, stage: int, *words: object) -> Said:
    """Save into `ours`; make sure that it has the same names and bytes as stock DeepSpeed's."""
    ours, theirs = folder / "ours", folder / "theirs"
    at = ["--folder", ours, "--compare", theirs, "--via", "enable"]
    said = launch(2, "--stage", stage, *SHORT, *at, *words)
    assert files(ours) == files(theirs)
    return said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 3])
def test_stock_files(launch: Launch, tmp_path: Path, stage: int, way: str) -> None:
    """Stock torch loads them."""
    compared(launch, tmp_path, stage, *WAYS[way])
    ours = tmp_path / "ours"
    assert ("pytorch_model.bin" in files(ours)) == (stage == 0)  # 3 saves none by default
    checkpoints = [name for name in files(ours) if name.endswith(".pt")]
    assert len(checkpoints) == (1 if stage == 0 else 4)
    for name in checkpoints:
        assert torch.load(ours / name, weights_only=False)
    assert (ours / "latest").read_text() == "global_step1"


@pytest.mark.parametrize(("stage", "way"), [(0, "at once"), (1, "overlapped")])
def test_model_by_all_ranks(
    launch: Launch, tmp_path: Path, stage: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that hold the same model write its file together, with stock's bytes."""
    monkeypatch.setenv("FASTSERIAL_COMPARE", "all")  # else each tensor is one rank's, as a whole
    said = compared(launch, tmp_path, stage, *WAYS[way], "--data-parallel", "--large", 2000)
    (shares,) = having(said, "shares")[0]["shares"]
    size = (tmp_path / "ours" / "global_step1" / "mp_rank_00_model_states.pt").stat().st_size
    assert size - 65536 < sum(shares) <= size  # without the directory
    assert min(shares) > size / 3


def test_what_ranks_cannot_share_has_one_writer(launch: Launch, tmp_path: Path) -> None:
    """Such as a key that only one has: stock's bytes, with a warning."""
    said = compared(launch, tmp_path, 1, "--data-parallel", "--key", "of rank {}")
    assert "one rank writes it alone" in having(said, "stderr")[0]["stderr"]


def test_latest_never_names_a_checkpoint_that_was_refused(launch: Launch, tmp_path: Path) -> None:
    """DeepSpeed refuses the key; the next step commits nothing."""
    at = ["--folder", tmp_path, "--via", "enable", *WAYS["overlapped"], "--destroy"]
    said = launch(2, "--stage", 1, *SHORT, *at, "--key", "checkpoint_parallel_dimensions")
    assert [line["failed"] for line in having(said, "failed")] == ["KeyError"] * 2
    assert not (tmp_path / "latest").exists()


def test_model_by_all_ranks_on_a_full_disk(launch: Launch, tmp_path: Path) -> None:
    """All ranks raise and train on; `latest` names the checkpoint before."""
    at = ["--folder", tmp_path, "--via", "enable", "--data-parallel", "--full-disk-on", 1]
    steps = ["--bf16", "--steps", 3, "--save-at", 1, "--save-at", 2]
    said = launch(2, "--stage", 1, *steps, *at, "--large", 2000)
    assert [line["rank"] for line in having(said, "failed")] == [0, 1]
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert len([line for line in having(said, "loss") if line["step"] == 2]) == 2


@pytest.mark.usefixtures("op")
def test_config_route(launch: Launch, tmp_path: Path) -> None:
    """A section of DeepSpeed's config; of its own sections what has no counterpart is named."""
    section = {"engine": "deepspeed", "small_file": 0}
    writer = {"type": "python", "io_buffer_size": 8 << 20, "bufer": 3}
    config = json.dumps({"fastserial": section, "checkpoint": {"writer": writer}})
    at = ["--stage", 1, "--folder", tmp_path, "--via", "config", "--config", config]
    said = launch(1, *SHORT, *at)
    (saved,) = having(said, "saved")
    assert (saved["by"], saved["container"]) == ("FastserialCheckpointEngine", "zip")
    assert len(files(tmp_path)) == 5
    expected = "in DeepSpeed's config: checkpoint.writer.type, checkpoint.writer.bufer."
    assert expected in having(said, "stderr")[0]["stderr"]


def test_config_route_by_the_environment(tmp_path: Path) -> None:
    """A program that names fastserial nowhere but in DeepSpeed's config."""
    if not examine().boot.pth:
        pytest.skip("this installation has no fastserial.pth")
    config = json.dumps({"fastserial": True})
    at = ["--stage", 1, "--folder", tmp_path, "--via", "stock", "--config", config]
    store = {"RANK": "0", "WORLD_SIZE": "1", "FASTSERIAL_TEST_STORE": str(tmp_path / "store")}
    said = parsed([run("train", *SHORT, *at, variables={**store, "FASTSERIAL": "1"})])
    assert [line["by"] for line in having(said, "saved")] == ["FastserialCheckpointEngine"]


def test_config_route_switched_off(launch: Launch, tmp_path: Path) -> None:
    section = {"enabled": False, "durable": False}
    at = ["--stage", 0, "--folder", tmp_path, "--via", "config"]
    said = launch(1, *SHORT, *at, "--config", json.dumps({"fastserial": section}))
    assert [line["by"] for line in having(said, "saved")] == ["TorchCheckpointEngine"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("full", [0, 1])
def test_one_rank_cannot_save(launch: Launch, tmp_path: Path, full: int, way: str) -> None:
    """All ranks raise (overlapped: in the next step), train on; `latest` names the one before."""
    at = ["--stage", 1, "--folder", tmp_path, "--via", "enable", *WAYS[way], "--full-disk-on", full]
    said = launch(2, "--bf16", "--steps", 3, "--save-at", 1, "--save-at", 2, *at)
    failed = having(said, "failed")
    assert [line["rank"] for line in failed] == [0, 1]
    own = "OSError" if way == "overlapped" and full == 0 else "WriteError"  # DeepSpeed's copy
    assert failed[full]["failed"] == own
    assert failed[1 - full]["failed"] == "CheckpointFailedError"
    assert (tmp_path / "latest").read_text() == "global_step1"
    left = [path.name for path in (tmp_path / "global_step2").iterdir()]
    assert not [name for name in left if name.endswith(".tmp")]
    if way == "overlapped":
        assert losses(said) == losses(launch(2, "--bf16", "--steps", 3, "--stage", 1))
    else:
        assert f"rank {full}: WriteError" in failed[1 - full]["text"]
        assert f"bf16_zero_pp_rank_{full}_mp_rank_00_optim_states.pt" not in left


def test_latest_waits_for_the_slowest(launch: Launch, tmp_path: Path) -> None:
    """It is younger than every file of the checkpoint."""
    at = ["--stage", 1, "--folder", tmp_path, "--via", "enable", "--slow-rank", 1]
    launch(2, *SHORT, *at)
    times = {path.name: path.stat().st_ctime_ns for path in (tmp_path / "global_step1").iterdir()}
    latest = (tmp_path / "latest").stat().st_ctime_ns
    assert latest > max(times.values())
    assert max(times.values()) - min(times.values()) > 2e9


def test_overlapped_latest_waits_for_all(launch: Launch, tmp_path: Path) -> None:
    """`save_checkpoint` returns before the slow rank has written; `latest` comes after it has."""
    at = ["--stage", 1, "--folder", tmp_path, "--via", "enable", *WAYS["overlapped"], "--destroy"]
    steps = ["--steps", 3, "--save-at", 1, "--save-at", 3]
    said = launch(2, "--bf16", *steps, *at, "--slow-rank", 1)
    saved = {(line["rank"], line["saved"]): line["latest"] for line in having(said, "saved")}
    assert saved == {(0, 1): None, (1, 1): None, (0, 3): "global_step1", (1, 3): "global_step1"}
    assert [line["destroyed"] for line in having(said, "destroyed")] == ["global_step3"] * 2
    for step in ("global_step1", "global_step3"):
        times = {path.name: path.stat().st_ctime_ns for path in (tmp_path / step).iterdir()}
        assert len(times) == 3
        assert max(times.values()) - min(times.values()) > 1e9
    assert (tmp_path / "latest").stat().st_ctime_ns > max(times.values())


def test_overlap_by_config(launch: Launch, tmp_path: Path) -> None:
    """DeepSpeed's own key for it."""
    writer = {"type": "fast", "decoupled": True}
    text = json.dumps({"fastserial": True, "checkpoint": {"writer": writer}})
    at = ["--stage", 2, "--folder", tmp_path, "--via", "config", "--config", text, "--destroy"]
    said = launch(1, "--bf16", "--steps", 1, "--save-at", 1, *at)
    assert [line["latest"] for line in having(said, "saved")] == [None]
    assert [line["destroyed"] for line in having(said, "destroyed")] == ["global_step1"]
