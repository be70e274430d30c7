"""The storage for torch_checkpointing (`pip install torch-checkpointing`)."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.told import tell, told

import fastserial
from fastserial.checkpoints.verify import checkpoints_in

package = pytest.importorskip("torch_checkpointing", reason="torch-checkpointing is not installed")

from fastserial.integrations.torch_checkpointing import (  # noqa: E402
    FastStorageConfig,
    init_process,
)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"weights": torch.randn(300, 1000), "small": torch.arange(7), "step": 3}


def same(found: Any, expected: Any) -> bool:
    return all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in expected.items()
    )


def manager(how: str, **more: Any) -> Any:
    config = getattr(package.CheckpointManager.Config, f"with_{how}_save")()
    config.storage_config = FastStorageConfig()
    for name, value in more.items():
        setattr(config, name, value)
    return config.build()


def test_files_are_those_of_torch(tmp_path: Path) -> None:
    storage = FastStorageConfig().create_storage()
    with storage.get_write_stream(tmp_path / "a.pt", state()) as file:
        torch.save(state(), file)
    report = fastserial.last_save_report()
    assert report is not None
    assert report.durable
    assert same(torch.load(tmp_path / "a.pt"), state())
    assert fastserial.verify(tmp_path / "a.pt").ok
    for whole in (True, False):
        arguments = package.storage.base_storage.ReadArgs(pre_read_full_file=whole)
        with storage.stream_read(tmp_path / "a.pt", arguments) as file:
            assert same(torch.load(file), state())
    storage.write(tmp_path / "raw", b"bytes")
    assert storage.read(tmp_path / "raw") == b"bytes"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    storage = FastStorageConfig().create_storage()
    storage.write(tmp_path / "a", b"old")
    with pytest.raises(ArithmeticError), storage.stream_write(tmp_path / "a") as file:
        file.write(b"new")
        raise ArithmeticError
    assert storage.read(tmp_path / "a") == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_renames(tmp_path: Path) -> None:
    storage = FastStorageConfig().create_storage()
    for name in ("new", "taken"):
        storage.mkdir(tmp_path / name / "inside")
    storage.rename(tmp_path / "new", tmp_path / "named", is_directory=True)
    assert storage.isdir(tmp_path / "named" / "inside")
    with pytest.raises(OSError, match="occupied"):
        storage.rename(tmp_path / "named", tmp_path / "taken", is_directory=True)


def test_a_manager_saves_and_loads_and_finds_damage(tmp_path: Path) -> None:
    one = manager("sync")
    one.save(str(tmp_path / "1"), {"model": state()})
    (file,) = (tmp_path / "1").glob("model*")
    assert same(torch.load(file), state())
    assert same(one.load(str(tmp_path / "1"), {"model": None})["model"], state())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(Exception, match="CRC-32") as caught:
        one.load(str(tmp_path / "1"), {"model": None})
    assert str(file) in str(caught.value)
    one.close()


@pytest.mark.parametrize("storage", ["its own", "ours"])
def test_the_tools_know_its_folders(storage: str, tmp_path: Path) -> None:
    """Of one rank, as many leave them that train on one GPU."""
    its_own = package.storage.filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
    one = manager("sync", **({} if storage == "ours" else {"storage_config": its_own}))
    one.save(str(tmp_path / "1"), {"model": state(), "step_1": 3})
    one.close()
    names = ["model_0.pt", "step_1_0.pt"]
    assert [os.path.basename(path) for path in checkpoints_in(tmp_path)] == names
    with pytest.raises(fastserial.errors.UnreadableCheckpointError, match="give a file"):
        fastserial.convert(tmp_path / "1", tmp_path / "file.pt")
    fastserial.convert(tmp_path / "1" / "model_0.pt", tmp_path / "file.pt")
    assert same(torch.load(tmp_path / "file.pt"), state())


@pytest.mark.parametrize("count", [2, 4])
def test_its_folders_of_many_ranks(count: int, tmp_path: Path) -> None:
    """FSDP2 and its optimizer: the page says how to make one file of the ranks' files."""
    ranks.run("rank_folders", count, tmp_path / "c", "save")
    assert len(os.listdir(tmp_path / "c")) == 3 * count
    ranks.run("rank_folders", count, tmp_path / "c", "put together")
    found, expected = (torch.load(tmp_path / f"c.{name}.pt") for name in ("together", "whole"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.skipif(
    os.environ.get("FASTSERIAL_DISTRIBUTED") != "full",
    reason="not FASTSERIAL_DISTRIBUTED=full: starts another interpreter",
)
@pytest.mark.parametrize("how", ["init_process", "FASTSERIAL=1", "not at all"])
def test_a_manager_with_a_process_of_its_own(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched on in it; or not: what it writes is right all the same."""
    monkeypatch.setenv("FASTSERIAL", str(int(how == "FASTSERIAL=1")))
    arguments = (str(tmp_path / "told"), how == "init_process")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = manager("async", subprocess_init_fn=begin, subprocess_init_args=arguments)
        try:
            for step in range(3):
                done = one.save(str(tmp_path / str(step)), {"model": {**state(), "step": step}})
                done.result(timeout=120)
        finally:
            one.close()
        ((process, patched),) = told(tmp_path / "told").items()
        assert process != os.getpid()
        assert patched == (how != "not at all")
        for step in range(3):
            found = manager("sync").load(str(tmp_path / str(step)), {"model": None})["model"]
            assert same(found, {**state(), "step": step})
            (file,) = (tmp_path / str(step)).glob("model*")
            assert fastserial.verify(file).ok


def begin(path: str, switch_on: bool) -> None:
    if switch_on:
        init_process()
    tell(path)
