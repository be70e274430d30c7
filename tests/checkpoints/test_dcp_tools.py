"""`verify`, `inspect` and `convert` where folders of DCP are not as usual."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from fastserial import convert, inspect, verify
from fastserial.cli.main import app
from fastserial.distributed import FastStorageWriter
from fastserial.errors import ConvertError


def save(state: dict[str, Any], path: Path, who: str = "stock", planner: Any = None) -> None:
    writer: Any = dcp.FileSystemWriter(path) if who == "stock" else FastStorageWriter(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(state, storage_writer=writer, planner=planner)


def save_alone(rank: int, state: dict[str, Any], path: Path) -> None:
    """Save as a rank does with `use_collectives=False`."""
    writer, planner = FastStorageWriter(path), DefaultSavePlanner()
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    planner.set_up_planner(state, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


# -- ranks with checkpoints of their own -----------------------------------------------------------


def test_ranks_with_checkpoints_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"w": torch.ones(5 + rank), f"of {rank}": torch.ones(3), "step": 3}
        save_alone(rank, state, tmp_path / "folder")
    report = verify(tmp_path / "folder")
    assert report.ok, report
    assert not report.notes
    found = inspect(tmp_path / "folder")
    assert [(one.key, one.shape, one.kind) for one in found.tensors] == [
        ("w", (5,), "tensor, in __0.metadata"),
        ("of 0", (3,), "tensor, in __0.metadata"),
        ("w", (6,), "tensor, in __1.metadata"),
        ("of 1", (3,), "tensor, in __1.metadata"),
    ]
    assert found.values == 2
    assert len(found.records) == 6
    assert "2 ranks, each with a checkpoint of its own" in found.notes
    output = CliRunner().invoke(app, ["inspect", str(tmp_path / "folder")])
    assert output.exit_code == 0
    with pytest.raises(ConvertError, match=r"folder: each rank saved .* of its own"):
        convert(tmp_path / "folder", tmp_path / "file.pt")
    assert not (tmp_path / "file.pt").exists()


def test_checkpoints_that_one_of_all_ranks_hides(tmp_path: Path) -> None:
    """As stock leaves them: torch loads the one of all ranks."""
    save_alone(0, {"a": torch.ones(3)}, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    save({"a": torch.ones(4)}, tmp_path, "ours")
    (shard,) = (path for path in before if path.suffix == ".distcp")
    for path, data in before.items():
        path.write_bytes(data)
    shard.rename(tmp_path / "__7_7.distcp")
    report = verify(tmp_path)
    assert report.ok, report
    assert [note.endswith("that torch loads: __7_7.distcp") for note in report.notes] == [True]
    assert inspect(tmp_path).tensors[0].shape == (4,)
    assert "__7_7.distcp: it belongs to no checkpoint that torch loads" in inspect(tmp_path).notes


# -- metadata --------------------------------------------------------------------------------------


# -- to a folder -----------------------------------------------------------------------------------


def odd_states() -> dict[str, tuple[Any, str]]:
    return {
        "joined": ({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, r"same one \(.*a\.b\)"),
        "number": ({1: torch.ones(1), "1": torch.ones(2)}, r"same one \(.*1\)"),
        "sparse": (
            {"x": {"s": torch.eye(5).to_sparse()}},
            r"entry 'x\.s' .* layout torch.sparse_coo",
        ),
        "meta": (
            {"m": torch.empty(3, device="meta")},
            r"entry 'm' .* without memory \(device meta\)",
        ),
    }


@pytest.mark.parametrize("name", list(odd_states()))
def test_what_a_folder_cannot_hold(name: str, tmp_path: Path) -> None:
    state, text = odd_states()[name]
    torch.save(state, tmp_path / "file.pt")
    target = tmp_path / "new" / "folder"
    with pytest.raises(ConvertError, match=rf"file\.pt: .*{text}.*--key") as caught:
        convert(tmp_path / "file.pt", target, "dcp")
    assert os.listdir(tmp_path) == ["file.pt"], "something is left of the target"
    assert "\n" not in str(caught.value)


# -- what a folder does not tell by itself ---------------------------------------------------------


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_what_a_folder_does_not_keep(tmp_path: Path) -> None:
    """Integer keys and shared memory, as in stock's tools; a warning names the keys."""
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "folder", "dcp")
    assert verify(tmp_path / "folder").ok
    with pytest.warns(UserWarning, match=r"'optimizer\.state\.0\.\w+' and \d+ more are text"):
        convert(tmp_path / "folder", tmp_path / "y.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(tmp_path / "folder"), str(tmp_path / "stock.pt"))
    for name in ("y", "stock"):
        found = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        assert list(found["optimizer"]["state"]) == ["0", "1", "2"]
        assert torch.equal(found["model"]["0.weight"], model[0].weight)
        assert torch.equal(found["model"]["1.weight"], model[0].weight)
