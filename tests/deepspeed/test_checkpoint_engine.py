"""Checkpoints of a DeepSpeed engine: stock's files, and a `latest` that can be relied on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from said import Said, check_exit, having, losses
from support.identity import fast, stock

import fastserial
from fastserial.diagnosis.examine import examine

Launch = Callable[..., Said]
SHORT = ["--bf16", "--steps", 2, "--save-at", 1]


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("stage", [0, 3])
def test_stock_files(launch: Launch, tmp_path: Path, stage: int) -> None:
    """The same names and bytes as stock DeepSpeed's, which stock torch loads."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    said = launch(
        2, "--stage", stage, *SHORT, "--folder", ours, "--compare", theirs, "--via", "enable"
    )
    check_exit(said)
    assert files(ours) == files(theirs)
    assert ("pytorch_model.bin" in files(ours)) == (stage == 0)  # 3 saves none by default
    checkpoints = [name for name in files(ours) if name.endswith(".pt")]
    assert len(checkpoints) == (1 if stage == 0 else 4)
    for name in checkpoints:
        assert torch.load(ours / name, weights_only=False)
    assert (ours / "latest").read_text() == "global_step1"


@pytest.mark.usefixtures("op")
def test_config_route(launch: Launch, tmp_path: Path) -> None:
    """A section of DeepSpeed's config; of its own sections what has no counterpart is named."""
    section = {"engine": "deepspeed", "small_file": 0}
    writer = {"type": "python", "io_buffer_size": 8 << 20, "bufer": 3}
    config = json.dumps({"fastserial": section, "checkpoint": {"writer": writer}})
    at = ["--stage", 1, "--folder", tmp_path, "--via", "config", "--config", config]
    said = launch(1, *SHORT, *at)
    check_exit(said)
    (saved,) = having(said, "saved")
    assert (saved["by"], saved["container"]) == ("FastserialCheckpointEngine", "zip")
    assert len(files(tmp_path)) == 5
    expected = "checkpoint.writer.type, checkpoint.writer.bufer has no effect"
    assert expected in having(said, "stderr")[0]["stderr"]


def test_config_route_by_the_environment(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that names fastserial nowhere but in DeepSpeed's config."""
    if not examine().boot.pth:
        pytest.skip("this installation has no fastserial.pth")
    monkeypatch.setenv("FASTSERIAL", "1")
    config = json.dumps({"fastserial": True})
    at = ["--stage", 1, "--folder", tmp_path, "--via", "stock", "--config", config]
    said = launch(1, *SHORT, *at)
    check_exit(said)
    assert [line["by"] for line in having(said, "saved")] == ["FastserialCheckpointEngine"]


def test_config_route_switched_off(launch: Launch, tmp_path: Path) -> None:
    section = {"enabled": False, "durable": False}
    at = ["--stage", 0, "--folder", tmp_path, "--via", "config"]
    said = launch(1, *SHORT, *at, "--config", json.dumps({"fastserial": section}))
    check_exit(said)
    assert [line["by"] for line in having(said, "saved")] == ["TorchCheckpointEngine"]


@pytest.mark.parametrize("full", [0, 1])
def test_one_rank_cannot_save(launch: Launch, tmp_path: Path, full: int) -> None:
    """All ranks raise and train on; `latest` names the checkpoint before, then the one after."""
    at = ["--stage", 1, "--folder", tmp_path, "--via", "enable", "--full-disk-on", full]
    said = launch(2, "--bf16", "--steps", 3, "--save-at", 1, "--save-at", 2, *at)
    check_exit(said)
    failed = having(said, "failed")
    assert [line["rank"] for line in failed] == [0, 1]
    assert failed[full]["failed"] == "WriteError"
    assert failed[1 - full]["failed"] == "CheckpointFailedError"
    assert f"rank {full}: WriteError" in failed[1 - full]["text"]
    assert (tmp_path / "latest").read_text() == "global_step1"
    left = [path.name for path in (tmp_path / "global_step2").iterdir()]
    assert f"bf16_zero_pp_rank_{full}_mp_rank_00_optim_states.pt" not in left
    assert not [name for name in left if name.endswith(".tmp")]


def test_latest_waits_for_the_slowest(launch: Launch, tmp_path: Path) -> None:
    """It is younger than every file of the checkpoint."""
    at = ["--stage", 1, "--folder", tmp_path, "--via", "enable", "--slow-rank", 1]
    check_exit(launch(2, *SHORT, *at))
    times = {path.name: path.stat().st_ctime_ns for path in (tmp_path / "global_step1").iterdir()}
    latest = (tmp_path / "latest").stat().st_ctime_ns
    assert latest > max(times.values())
    assert max(times.values()) - min(times.values()) > 2e9


# --- written while training goes on ------------------------------------------------------------

OVERLAP = ["--via", "enable", "--overlap"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_overlapped_files_are_stocks(launch: Launch, tmp_path: Path, stage: int) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    at = ["--folder", ours, "--compare", theirs, *OVERLAP]
    check_exit(launch(2, "--stage", stage, *SHORT, *at))
    assert files(ours) == files(theirs)


def test_overlapped_latest_waits_for_all(launch: Launch, tmp_path: Path) -> None:
    """`save_checkpoint` returns before the slow rank has written; `latest` comes after it has."""
    at = ["--stage", 1, "--folder", tmp_path, *OVERLAP, "--slow-rank", 1, "--destroy"]
    said = launch(2, "--bf16", "--steps", 3, "--save-at", 1, "--save-at", 3, *at)
    check_exit(said)
    saved = {(line["rank"], line["saved"]): line["latest"] for line in having(said, "saved")}
    assert saved == {(0, 1): None, (1, 1): None, (0, 3): "global_step1", (1, 3): "global_step1"}
    assert [line["destroyed"] for line in having(said, "destroyed")] == ["global_step3"] * 2
    for step in ("global_step1", "global_step3"):
        times = {path.name: path.stat().st_ctime_ns for path in (tmp_path / step).iterdir()}
        assert len(times) == 3
        assert max(times.values()) - min(times.values()) > 1e9
    assert (tmp_path / "latest").stat().st_ctime_ns > max(times.values())


@pytest.mark.parametrize("full", [0, 1])
def test_overlapped_one_rank_cannot_save(launch: Launch, tmp_path: Path, full: int) -> None:
    """The next step raises on all ranks; they train on, and save again."""
    at = ["--stage", 1, "--folder", tmp_path, *OVERLAP, "--full-disk-on", full]
    said = launch(2, "--bf16", "--steps", 3, "--save-at", 1, "--save-at", 2, *at)
    check_exit(said)
    failed = having(said, "failed")
    assert [line["rank"] for line in failed] == [0, 1]
    assert failed[full]["failed"] == ("OSError" if full == 0 else "WriteError")  # DeepSpeed's copy
    assert failed[1 - full]["failed"] == "CheckpointFailedError"
    assert (tmp_path / "latest").read_text() == "global_step1"
    left = [path.name for path in (tmp_path / "global_step2").iterdir()]
    assert not [name for name in left if name.endswith(".tmp")]
    plain = launch(2, "--bf16", "--steps", 3, "--stage", 1)
    assert losses(said) == losses(plain)


def test_overlap_by_config(launch: Launch, tmp_path: Path) -> None:
    """DeepSpeed's own key for it."""
    writer = {"type": "fast", "decoupled": True}
    text = json.dumps({"fastserial": True, "checkpoint": {"writer": writer}})
    at = ["--stage", 2, "--folder", tmp_path, "--via", "config", "--config", text, "--destroy"]
    said = launch(1, "--bf16", "--steps", 1, "--save-at", 1, *at)
    check_exit(said)
    assert [line["latest"] for line in having(said, "saved")] == [None]
    assert [line["destroyed"] for line in having(said, "destroyed")] == ["global_step1"]


# --- DeepSpeed's own "decoupled": true: a spawned process saves --------------------------------

WRITER = {"type": "fast", "decoupled": True, "data_parallel": "replica"}
DECOUPLED = json.dumps({"checkpoint": {"writer": WRITER}})
PINNED = {"CROSS_SIZE": "1", "CROSS_RANK": "0", "DS_PIN_MEMORY_BACKEND": "native"}  # what it needs


def again(value: object) -> bytes:
    """What stock saves of a value: equal values have equal bytes."""
    buffer = io.BytesIO()
    with stock():
        torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.usefixtures("op")
def test_decoupled(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`FASTSERIAL=1` patches it, `install()` in its parent does not; the files are the same."""
    how = ["--stage", 3, *SHORT[:3]]  # under ZeRO 3 its files have the names that are looked for
    own = ["--save-at", 1, "--config", DECOUPLED, "--views", "--destroy"]
    saved: dict[str, dict[str, bytes]] = {}
    for variable, via in ("1", "stock"), ("", "install"):
        monkeypatch.setenv("FASTSERIAL", variable)
        folder = tmp_path / via
        said = launch(1, *how, *own, "--folder", folder, "--via", via, env=PINNED)
        check_exit(said)
        assert having(said, "saved")[0]["by"] == "DecoupledCheckpointEngine"
        assert having(said, "destroyed")[0]["destroyed"] == "global_step1"
        saved[via] = {name: data for name, data in files(folder).items() if name.endswith(".pt")}
        assert len(saved[via]) == 2
        (child,) = having(said, "child")
        assert child["child"] != child["parent"]
        boot = examine().boot  # what `fastserial doctor` says
        assert child["patched"] == (boot.switch is True and boot.pth)
        # zips: torch's own; None: the child has not imported fastserial
        assert child["counted"] == ([2, 2, 0] if variable else None)
        assert bool(variable) == child["patched"]
    assert saved["stock"] == saved["install"]

    for name in saved["install"]:
        path = folder / name
        assert fastserial.verify(path).ok
        with stock():
            expected = again(torch.load(path, weights_only=False))
        assert again(fastserial.load(path, weights_only=False)) == expected
        with fast(small_file=0):
            loaded = torch.load(path, weights_only=False)
        assert again(loaded) == expected
    small = {"FASTSERIAL_SMALL_FILE": "0"}
    resumed = launch(1, *how, "--folder", folder, "--via", "enable", "--resume", env=small)
    check_exit(resumed)
    assert having(resumed, "loaded")[0]["loader"] == "threads"
    assert losses(resumed) == {at: loss for at, loss in losses(said).items() if at[1] == 1}
