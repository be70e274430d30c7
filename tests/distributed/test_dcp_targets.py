"""Unusual tensors that a checkpoint is loaded into, and unusual containers that are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_map

import fastserial
from fastserial.distributed import FastLoadPlanner, FastStorageReader, FastStorageWriter
from fastserial.distributed.dcp.storage_writer import snapshot
from fastserial.errors import UnreadableCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

COUNT = 600_000  # elements: a large item
WRAPPING = ("detach", "alias", "clone", "slice", "view")


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


@pytest.mark.parametrize("options", [{}, {"direct": True}], ids=["cached", "direct"])
@pytest.mark.parametrize("planner", [None, FastLoadPlanner], ids=["stock", "fast"])
@pytest.mark.parametrize("count", [7, COUNT])
def test_into_a_tensor_without_memory(
    tmp_path: Path, options: dict[str, Any], planner: Callable[[], Any] | None, count: int
) -> None:
    """As stock does: what is read is copied by the tensor's own `copy_`."""
    wanted = torch.arange(float(count))
    dcp.save({"a": wanted}, storage_writer=FastStorageWriter(tmp_path), no_dist=True)
    target = Wrapper(torch.zeros(count))
    made = planner() if planner is not None else None
    with fastserial.options(**options):
        reader = FastStorageReader(tmp_path)
        dcp.load({"a": target}, storage_reader=reader, planner=made, no_dist=True)
    assert torch.equal(target.inner, wanted)


class Unknown(torch.Tensor):
    """A class that nobody allowed `weights_only` to load."""


def test_a_class_that_is_not_allowed(tmp_path: Path) -> None:
    """It is not damage: the error passes on torch's advice."""
    value = torch.arange(5.0).as_subclass(Unknown)
    dcp.save({"a": value}, storage_writer=FastStorageWriter(tmp_path), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"a": torch.zeros(5)}, storage_reader=FastStorageReader(tmp_path), no_dist=True)
    (error,) = (found for found, _ in caught.value.failures.values())
    assert isinstance(error, UnreadableCheckpointError)
    assert "add_safe_globals" in str(error)
    target = {"a": torch.zeros(5)}
    with torch.serialization.safe_globals([Unknown]):
        dcp.load(target, storage_reader=FastStorageReader(tmp_path), no_dist=True)
    assert torch.equal(target["a"], torch.arange(5.0))


class Lazy(Mapping[str, torch.Tensor]):
    """Makes its tensors when asked for, and keeps none."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.full((3,), float(key))

    def __iter__(self) -> Iterator[str]:
        return map(str, range(50))

    def __len__(self) -> int:
        return 50


def test_a_snapshot_of_tensors_that_nobody_keeps() -> None:
    """An object that is gone leaves its identity to another."""
    copied = snapshot({"a": Lazy()})["a"]
    assert [float(copied[str(n)][0]) for n in range(50)] == [float(n) for n in range(50)]


def test_a_snapshot_keeps_what_is_shared() -> None:
    tensor = torch.ones(3)
    copied = snapshot({"a": tensor, "b": [tensor]})
    assert copied["a"] is copied["b"][0]
    assert copied["a"] is not tensor
