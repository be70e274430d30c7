"""Our storage and planners with other parts of torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.nests import differing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.utils._pytree import tree_map

from fastserial import DistributedError, convert, distributed, verify
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.distributed.dcp.planners import divide
from fastserial.distributed.load import folder_contents as contents
from fastserial.distributed.load.files import StoredFiles
from fastserial.errors import CheckpointReplacedError, FastserialError, UnreadableCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # that this is one process


def a_state(value: float = 1) -> dict[str, Any]:
    return {"a": torch.full((500_000,), value), "b": {"c": torch.full((3,), value)}, "step": value}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert not differing(found, expected)


def test_the_tools_of_torch(tmp_path: Path) -> None:
    """A folder that they make of a file, and the file that they make of a folder of ours."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    torch.save(a_state(), tmp_path / "file.pt")
    torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "folder")
    found = a_state(0)
    dcp.load(found, storage_reader=FastStorageReader(tmp_path / "folder"))
    assert_same(found, a_state())
    assert verify(tmp_path / "folder").ok
    convert(tmp_path / "folder", tmp_path / "back.pt")
    assert_same(torch.load(tmp_path / "back.pt"), a_state())
    writer = FastStorageWriter(tmp_path / "ours")
    dcp.save(a_state(), storage_writer=writer, planner=FastSavePlanner())
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "theirs.pt")
    assert_same(torch.load(tmp_path / "theirs.pt"), a_state())


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
    next(tmp_path.glob("*.distcp")).unlink()  # what is missing was not replaced
    with pytest.raises(CheckpointException) as caught:
        dcp.load(a_state(0), storage_reader=FastStorageReader(tmp_path))
    error = next(iter(caught.value.failures.values()))[0]
    assert isinstance(error, FileNotFoundError)
    assert not isinstance(error, FastserialError)


WRAPPING = ("detach", "alias", "clone", "slice", "view")


@pytest.mark.parametrize("often", [False, True])
def test_a_save_that_completes_while_its_contents_are_read(
    often: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank would be filled from this checkpoint, and the next from another."""
    read, steps = contents.index_of_folder, iter(range(2, 100 if often else 3))

    def late(files: StoredFiles, between: Any) -> Any:
        """As rank 0 has it: other ranks open the files later."""
        found = read(StoredFiles(files.path, files.config), between)
        for step in itertools.islice(steps, 1):
            dcp.save(a_state(step), storage_writer=FastStorageWriter(tmp_path))
        return found

    dcp.save(a_state(1), storage_writer=FastStorageWriter(tmp_path))
    monkeypatch.setattr(contents, "index_of_folder", late)
    state = a_state(0)
    if often:
        with pytest.raises(DistributedError, match="not the file that rank 0 sees"):
            distributed.load(tmp_path, state)
        assert_same(state, a_state(0))
    else:
        distributed.load(tmp_path, state)
        assert_same(state, a_state(2))


def test_a_value_on_one_rank_and_a_tensor_on_another() -> None:
    """Stock fails, too, with neither key nor rank."""
    value, tensor = (
        create_default_local_save_plan({"x.y": one}, False) for one in (3, torch.zeros(3))
    )
    for plans, ranks in (
        ([value, tensor, tensor], "4 and 5"),
        ([tensor, tensor, value], "4 and 6"),
    ):
        with pytest.raises(ValueError, match=rf"^x\.y: a value on one of the ranks {ranks}"):
            divide(plans, [4, 5, 6], False, set(), set())


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantized weights are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Wrapper = make(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def bare(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        found = function(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        wraps = isinstance(found, torch.Tensor) and function.__name__.startswith(WRAPPING)
        return Wrapper(found) if wraps else found


@pytest.mark.parametrize("planner", [None, FastLoadPlanner], ids=["stock", "fast"])
@pytest.mark.parametrize("count", [7, 600_000])
def test_into_a_tensor_without_memory(
    tmp_path: Path, planner: Callable[[], Any] | None, count: int
) -> None:
    """As stock does: what is read is copied by the tensor's own `copy_`."""
    wanted = torch.arange(float(count))
    dcp.save({"a": wanted}, storage_writer=FastStorageWriter(tmp_path))
    target = Wrapper(torch.zeros(count))
    made = planner() if planner is not None else None
    dcp.load({"a": target}, storage_reader=FastStorageReader(tmp_path), planner=made)
    assert torch.equal(target.inner, wanted)


class Unknown(torch.Tensor):
    """A class that nobody allowed `weights_only` to load."""


def test_a_class_that_is_not_allowed(tmp_path: Path) -> None:
    """It is not damage: the error passes on torch's advice."""
    value = torch.arange(5.0).as_subclass(Unknown)
    dcp.save({"a": value}, storage_writer=FastStorageWriter(tmp_path))
    target = {"a": torch.zeros(5)}
    with pytest.raises(CheckpointException, match="add_safe_globals") as caught:
        dcp.load(target, storage_reader=FastStorageReader(tmp_path))
    (error,) = (found for found, _ in caught.value.failures.values())
    assert isinstance(error, UnreadableCheckpointError)
    with torch.serialization.safe_globals([Unknown]):
        dcp.load(target, storage_reader=FastStorageReader(tmp_path))
    assert torch.equal(target["a"], torch.arange(5.0))
