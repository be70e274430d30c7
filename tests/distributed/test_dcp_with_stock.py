"""Our storage and planners with other parts of torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from fastserial import convert, verify
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.distributed.dcp.planners import divide
from fastserial.errors import CheckpointReplacedError, FastserialError


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        yield


def a_state(value: float = 1) -> dict[str, Any]:
    return {"a": torch.full((500_000,), value), "b": {"c": torch.full((3,), value)}, "step": value}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.equal(found["a"], expected["a"])
    assert torch.equal(found["b"]["c"], expected["b"]["c"])
    assert found["step"] == expected["step"]


def test_without_a_process_group_by_name(tmp_path: Path) -> None:
    writer = FastStorageWriter(tmp_path)
    dcp.save(a_state(), storage_writer=writer, planner=FastSavePlanner(), no_dist=True)
    for planner in (None, FastLoadPlanner()):
        found = a_state(0)
        reader = FastStorageReader(tmp_path)
        dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
        assert_same(found, a_state())


def test_what_the_tools_of_torch_make_of_a_file(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch.save(a_state(), tmp_path / "file.pt")
    torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "folder")
    found = a_state(0)
    dcp.load(found, storage_reader=FastStorageReader(tmp_path / "folder"))
    assert_same(found, a_state())
    assert verify(tmp_path / "folder").ok
    convert(tmp_path / "folder", tmp_path / "back.pt")
    assert_same(torch.load(tmp_path / "back.pt"), a_state())


def test_the_storage_of_hugging_face_with_our_planners(tmp_path: Path) -> None:
    if not hasattr(dcp, "HuggingFaceStorageWriter"):
        pytest.skip("dcp of this torch has no HuggingFaceStorageWriter")
    state = {"a": torch.randn(500_000), "b": torch.randn(3).bfloat16()}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path))
    dcp.save(dict(state), storage_writer=writer, planner=FastSavePlanner())
    for planner in (None, FastLoadPlanner()):
        found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        reader = dcp.HuggingFaceStorageReader(str(tmp_path))
        dcp.load(found, storage_reader=reader, planner=planner)
        assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def test_a_save_that_completes_during_a_load(tmp_path: Path) -> None:
    class Late(FastStorageReader):
        def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_storage_reader(*args, **kwargs)
            dcp.save(a_state(2), storage_writer=FastStorageWriter(tmp_path))

    dcp.save(a_state(1), storage_writer=FastStorageWriter(tmp_path))
    with pytest.raises(CheckpointException, match="load again") as caught:
        dcp.load(a_state(0), storage_reader=Late(tmp_path))
    error = next(iter(caught.value.failures.values()))[0]
    assert isinstance(error, CheckpointReplacedError)
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(tmp_path / "__0_0.distcp")


def test_a_file_that_is_missing_is_not_called_replaced(tmp_path: Path) -> None:
    dcp.save(a_state(1), storage_writer=FastStorageWriter(tmp_path))
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointException) as caught:
        dcp.load(a_state(0), storage_reader=FastStorageReader(tmp_path))
    error = next(iter(caught.value.failures.values()))[0]
    assert isinstance(error, FileNotFoundError)
    assert not isinstance(error, FastserialError)


@pytest.mark.parametrize("size", [(3,), ()])
def test_a_value_on_one_rank_and_a_tensor_on_another(size: tuple[int, ...]) -> None:
    """Stock fails, too, with neither key nor rank."""
    value = create_default_local_save_plan({"x.y": 3}, False)
    tensor = create_default_local_save_plan({"x.y": torch.zeros(size)}, False)
    for plans, ranks in (
        ([value, tensor, tensor], "0 and 1"),
        ([tensor, tensor, value], "0 and 2"),
    ):
        with pytest.raises(ValueError, match=rf"^x\.y: a value on one of the ranks {ranks}"):
            divide(plans, False, set(), set())
